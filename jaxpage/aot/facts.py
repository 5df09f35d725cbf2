"""What a compiled program is made of, read from XLA's text and its memory plan."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "f64": 8}


@dataclass(frozen=True)
class ProgramFacts:
    """Of one device."""

    argument_bytes: int
    """Weights, cache and batch; results that are kept in place count here and not again."""
    scratch_bytes: int
    result_bytes: int
    """What is given back beside what is updated in place."""
    num_aliased: int
    """Arguments that results are written over."""
    collectives: dict[str, int]
    """How many of each kind always run."""
    num_kernels: int
    """Launches that always run: fusions, library calls, Triton kernels and copies."""
    num_triton_kernels: int
    largest_gathered: int
    """Elements of the largest array that is gathered from all devices, in any branch."""
    num_host_transfers: int
    num_decisions: int
    """Branches, and loops of unknown length: at each, a GPU's host waits for the device to tell how to go on."""

    @property
    def total_bytes(self) -> int:
        """What a device needs while the program runs."""
        return self.argument_bytes + self.scratch_bytes + self.result_bytes


def facts_of(program: jax.stages.Compiled) -> ProgramFacts:
    """Look at a program, which need not be one for this machine."""
    text = program.as_text() or ""
    entry = entry_of(text)
    memory = program.memory_analysis()
    assert memory is not None
    gathers = re.findall(r"^.* = (.*?) all-gather(?:-start)?\(", text, re.MULTILINE)
    return ProgramFacts(
        argument_bytes=memory.argument_size_in_bytes,
        scratch_bytes=memory.temp_size_in_bytes,
        result_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        num_aliased=_count(r"(?:may|must)-alias", text[: text.index("\n")]),
        collectives={kind: n for kind in _COLLECTIVES if (n := _count(rf" {kind}(?:-start)?\(", entry))},
        num_kernels=_count(r" (?:fusion|custom-call|copy|copy-start|call|sort)\(", entry),
        num_triton_kernels=_count(r'custom_call_target="triton_kernel_call_ffi"', text),
        largest_gathered=max((size for shapes in gathers for size in _sizes(shapes)), default=0),
        num_host_transfers=_count(r" (?:infeed|outfeed|send|recv)\(|MoveToHost|S\(5\)", text),
        num_decisions=_count(r" conditional\(", text) + _count(r" while\((?!.*known_trip_count)", text),
    )


def entry_of(text: str) -> str:
    """The part of a program's text that always runs: without the branches, of which only some do."""
    return text[text.index("\nENTRY ") :]


def bytes_of(shapes: str) -> int:
    """Of all arrays in a shape of XLA's, such as `(f32[8,128]{1,0}, s32[])`."""
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * _ITEM_BYTES.get(kind, 4)
        for kind, dims in re.findall(r"([a-z]+[0-9]*[a-z0-9]*)\[([\d,]*)\]", shapes)
    )


def _sizes(shapes: str) -> Iterator[int]:
    for dims in re.findall(r"\[([\d,]+)\]", shapes):
        yield math.prod(int(n) for n in dims.split(","))


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))
