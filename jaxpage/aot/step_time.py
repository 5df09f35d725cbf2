"""How long a compiled program should take on a card, kernel by kernel: a model, not a measurement.

What goes in is counted from the program's text: its launches in order, the bytes of each, the tiles of its products,
its collectives. `card` holds what is assumed of the GPU, `gemm_time` how products use it. Attention reads whole caches
as arguments, and how much of them depends on the step: the caller says how long one layer's takes.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from jaxpage.aot.card import Card
from jaxpage.aot.facts import entry_of
from jaxpage.aot.gemm_time import gemm_seconds
from jaxpage.aot.gemms import Gemm, gemms_of
from jaxpage.aot.traffic import (
    Instruction,
    arrays_of,
    bodies_of,
    in_place_shapes,
    instructions_of,
    moved_bytes,
)

_LEAST_SECONDS = 0.7e-6
"""Of a small kernel's own: one round of loads from the L2, arithmetic, one of stores."""
_COLLECTIVE_SECONDS = 9e-6
"""A small all-reduce of NCCL's over NVLink among eight GPUs (its LL protocol), from the first to the last of them."""
_LINK_BYTES_PER_SECOND = 360e9
"""What each GPU sends and takes at a time in a large all-reduce over NVLink 4, of 450."""
PARTS = ("gemm", "attention", "kv_write", "other", "collective", "launch")
"""What a step's time goes to: matrix products, attention, ... and the gaps between kernels."""
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass
class StepTime:
    """Seconds of one run, by what they go to. All add up to `seconds`."""

    launches: int = 0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By name in `PARTS`."""
    gemms: list[tuple[Gemm, float]] = field(default_factory=list)
    """Each product, and its seconds."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step_time(text: str, card: Card, attention_seconds: float) -> StepTime:
    """Of a program's text. attention_seconds: of one layer's attention, its reduction included."""
    found = StepTime()
    entry = instructions_of(entry_of(text))
    shapes = {each.name: each.shape for each in entry}
    in_place = in_place_shapes(text, entry)
    bodies = bodies_of(text)
    gemms = {gemm.name: gemm for gemm in gemms_of(text)}
    for each in entry:
        if not each.launches:
            continue
        found.launches += 1
        found.parts["launch"] += card.kernel_seconds
        part = "gemm" if each.name in gemms else _part_of(each, shapes, in_place)
        match part:
            case "gemm":
                seconds = gemm_seconds(gemms[each.name], card)
                found.gemms.append((gemms[each.name], seconds))
            case "attention":
                seconds = attention_seconds
            case "reduction":  # counted with its attention
                part, seconds = "attention", 0.0
            case "collective":
                seconds = _COLLECTIVE_SECONDS + moved_bytes(each, shapes, set(), bodies) / _LINK_BYTES_PER_SECOND
            case _:
                num_bytes = moved_bytes(each, shapes, in_place, bodies)
                # What one kernel has written the next one finds in the L2, if that holds it.
                rate = card.l2_bytes_per_second if num_bytes < card.l2_bytes / 2 else card.dram_bytes_per_second
                seconds = max(_LEAST_SECONDS, num_bytes / rate)
        found.parts[part] += seconds
    return found


def _part_of(each: Instruction, shapes: Mapping[str, str], in_place: Set[str]) -> str:
    """What a kernel belongs to that is no matrix product."""
    if each.kind.removesuffix("-start") in _COLLECTIVES:
        return "collective"
    if "triton_kernel_call" not in each.line:
        return "other"
    reads_cache = any(in_place & set(arrays_of(shapes.get(name, ""))) for name in each.operands)
    if "output_to_operand_aliasing" in each.line and reads_cache:
        return "kv_write"
    return "attention" if reads_cache else "reduction"
