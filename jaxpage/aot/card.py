"""What a kernel may ask of a GPU, as far as a model of its time needs: rates, sizes and latencies.

None of it was measured by us. Rates that kernels reach are what an H200 was measured to reach (a copy moves 4.3 TB/s of
its 4.8, a large bf16 product does 790 TFLOP/s of its 989), and taken as the same share of any other GPU's data sheet.
"""

from dataclasses import dataclass

from jaxpage.aot.targets import GPUTarget

_COPY_SHARE = 4.3 / 4.8
_PRODUCT_SHARE = 790 / 989
_L2_BYTES_PER_CLOCK = 36
"""Of an SM, of the 64 that it can take: an H100's product of 128 x 128 tiles at 610 TFLOP/s reads 9.5 TB/s."""
_TRITON_SHARE = 0.8
"""Of what the best library reaches in large products: loads and products take turns at the tiles' ends."""
_MMA_SYNC_SHARE = 0.62
"""Of the peak: what `mma.sync` reaches on Hopper, which only `wgmma` drives at full rate (Luo et al., 2024)."""


@dataclass(frozen=True)
class Card:
    """One GPU. Rates are what good kernels reach, not what the data sheet says."""

    num_sms: int
    clocks_per_second: float
    dram_bytes_per_second: float
    l2_bytes_per_second: float
    l2_bytes: int
    flops_per_second: float
    """Dense bf16 products by the instructions that the GPU is best at, in kernels of Triton's."""
    best_flops_per_second: float
    """The same in the best kernels that there are."""
    slow_flops_per_second: float
    """The same by `mma.sync`, which is all that tiles of fewer than 64 weights or 4 warps can use on Hopper."""
    shared_bytes: int
    """Of an SM; a CTA takes 1 KiB more than it asks for."""
    dram_latency: float = 0.8e-6
    """Seconds from a load of a tile to its data, under load."""
    kernel_seconds: float = 1.0e-6
    """From the end of a kernel in a CUDA graph to the first work of the one that depends on it."""
    register_file: int = 65536
    max_threads: int = 2048

    @property
    def bytes_in_flight(self) -> float:
        """What one SM must have on its way for all of them to keep the memory busy (Little's law)."""
        return self.dram_bytes_per_second * self.dram_latency / self.num_sms


def card_of(gpu: GPUTarget) -> Card:
    """The card that a data sheet describes."""
    peak = gpu.flops_per_second
    wgmma = gpu.compute_capability >= 9
    return Card(
        num_sms=gpu.num_sms,
        clocks_per_second=gpu.clock_ghz * 1e9,
        dram_bytes_per_second=_COPY_SHARE * gpu.bytes_per_second,
        l2_bytes_per_second=_L2_BYTES_PER_CLOCK * gpu.clock_ghz * 1e9 * gpu.num_sms,
        l2_bytes=gpu.l2_bytes,
        flops_per_second=_TRITON_SHARE * _PRODUCT_SHARE * peak,
        best_flops_per_second=_PRODUCT_SHARE * peak,
        slow_flops_per_second=_TRITON_SHARE * (_MMA_SYNC_SHARE if wgmma else _PRODUCT_SHARE) * peak,
        shared_bytes=gpu.shared_bytes,
    )
