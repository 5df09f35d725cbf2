"""The table of parts, in their order: what decides most comes first."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """One thing to find out."""

    name: str
    function: str
    """Module of this package and function in it: `(Context) -> rows`."""
    seconds: float
    """After so many it is killed."""
    group: str
    """Parts of a group that follow one another share a process, and what is on its device."""
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None
    """A part that must have ended before."""
    is_alongside: bool = False
    """It needs no GPU, and runs while others do."""


TUNING_FLAGS = (
    "--xla_gpu_per_fusion_autotune_cache_dir={out}/autotune_per_fusion "
    "--xla_gpu_dump_autotune_results_to={out}/autotune.txt"
)
"""Of XLA: whatever it times, it writes down. They are part of what an artifact is compiled for."""
_TUNING = {"XLA_FLAGS": TUNING_FLAGS}
_WITHOUT_GPU = {"JAX_PLATFORMS": "cpu"}

PARTS = (
    Part("machine", "machine:machine", 60, "machine"),
    Part("engine", "engines:engine", 230, "engine", _TUNING),
    Part("draws", "engines:draws", 40, "engine", _TUNING),
    Part("modes", "engines:modes", 40, "engine", _TUNING),
    Part("programs", "engines:programs", 30, "engine", _TUNING),
    Part("trace", "engines:trace", 60, "engine", _TUNING),
    Part("compile_artifact", "artifacts:compile_artifact", 200, "compile_artifact", _WITHOUT_GPU, is_alongside=True),
    Part("peaks", "machine:peaks", 40, "kernels", _TUNING),
    Part("attention", "correctness:attention", 90, "kernels", _TUNING),
    Part("kv_writes", "correctness:kv_writes", 40, "kernels", _TUNING),
    Part("tokens", "tokens:tokens", 90, "tokens", _TUNING),
    Part("decode_attention", "attention_speed:decode", 60, "speed", _TUNING),
    Part("prefill_attention", "attention_speed:prefill", 40, "speed", _TUNING),
    Part("products", "products:products", 60, "speed", _TUNING),
    Part("artifact", "artifacts:artifact", 90, "artifact", needs="compile_artifact"),
    Part("tensor_parallel", "engines:tensor_parallel", 120, "tensor_parallel", _TUNING),
)


def chosen(names: list[str]) -> tuple[Part, ...]:
    """Those named, or all. Raises `ValueError` for a name that there is not."""
    known = [part.name for part in PARTS]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"there is no part {', '.join(unknown)}: they are {', '.join(known)}")
    return tuple(part for part in PARTS if not names or part.name in names)
