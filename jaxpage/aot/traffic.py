"""How many bytes a compiled program reads and writes, kernel by kernel, read from XLA's text.

A kernel reads its operands and writes its results once. Two kinds are not what their shapes say, and count as nothing:
what is updated in place (donated arrays, of which a step touches a few numbers), and the table that an embedding is
looked up in. Only what always runs is counted: a greedy step has no branches.
"""

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from jaxpage.aot.facts import bytes_of, entry_of

_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "partition-id", "after-all", "iota"}
_ENDS = ("-done",)
"""Second halves of operations that are counted where they start."""
PARTS = ("layer", "logits", "sample")
"""Named scopes of a step."""


@dataclass(frozen=True)
class Instruction:
    """A line of a program's text."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    line: str

    @property
    def launches(self) -> bool:
        """Whether it does anything on a device."""
        return self.kind not in _FREE and not self.kind.endswith(_ENDS)


def traffic_of(text: str) -> dict[str, int]:
    """Bytes that the program moves in one run, by part of the step; "other" is what belongs to none.

    What products leave of themselves to be added up counts apart, as "layer_partial_sums" and so on.
    """
    entry = instructions_of(entry_of(text))
    in_place = in_place_shapes(text, entry)
    bodies = bodies_of(text)
    total: Counter[str] = Counter()
    shapes = {each.name: each.shape for each in entry}
    split: set[str] = set()
    for each in entry:
        if not each.launches:
            continue
        part = _part_of(each.line)
        total[part] += moved_bytes(each, shapes, in_place, bodies)
        # A product that is split along what it sums over leaves float32 parts, which another kernel adds.
        if re.match(r"gemm_fusion\S* = f32\[\d+,\d+,\d+\]", f"{each.name} = {each.shape}"):
            total[part] -= bytes_of(each.shape)
            total[f"{part}_partial_sums"] += 2 * bytes_of(each.shape)
            split.add(each.name)
        total[part] -= sum(bytes_of(shapes[name]) for name in each.operands if name in split)
    return dict(total)


def moved_bytes(each: Instruction, shapes: Mapping[str, str], in_place: Set[str], bodies: Mapping[str, str]) -> int:
    """What a kernel reads and writes.

    shapes: of all instructions by name; in_place: arrays that do not count; bodies: of all computations by name.
    """
    results = sum(bytes_of(array) for array in arrays_of(each.shape) if array not in in_place)
    called = re.search(r"calls=%?([\w.\-]+)", each.line)
    body = bodies.get(called.group(1), "") if called else ""
    operands = 0
    for index, name in enumerate(each.operands):
        looked_up = _bytes_looked_up(body, index)
        arrays = arrays_of(shapes.get(name, ""))
        operands += looked_up or sum(bytes_of(array) for array in arrays if array not in in_place)
    return results + operands


def bodies_of(text: str) -> dict[str, str]:
    """The lines of every computation of a program, by its name."""
    found = re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return {match.group(1): match.group(2) for match in found}


def _bytes_looked_up(body: str, index: int) -> int:
    """What a fusion reads of an argument of which it takes a few rows, as of a table of embeddings; 0 of all others."""
    parameter = re.search(rf"%?([\w.\-]+) = \S+ parameter\({index}\)", body)
    if parameter is None:
        return 0
    names, found = {parameter.group(1)}, 0
    for line in body.splitlines():
        it = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\S+) ([a-z\-]+)\(([^)]*)\)", line)
        taken = re.findall(r"%?([\w.\-]+)", it.group(4)) if it else []
        if names & set(taken[1:]):
            return 0
        if it is None or not names & set(taken):
            continue
        match it.group(3):
            case "bitcast" | "reshape":
                names.add(it.group(1))
            case "gather" | "dynamic-slice":
                found += bytes_of(it.group(2))
            case _:
                return 0
    return found


def _part_of(line: str) -> str:
    scope = re.search(r'op_name="([^"]*)"', line)
    found = re.findall(r"[\w]+", scope.group(1)) if scope else []
    return next((part for part in PARTS if part in found), "other")


def instructions_of(body: str) -> list[Instruction]:
    """The lines of a computation, in the order in which they run."""
    found = []
    for line in body.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)\)", line)
        if match:
            name, shape, kind, operands = match.groups()
            found.append(Instruction(name, shape, kind, tuple(re.findall(r"%([\w.\-]+)", operands)), line))
    return found


def in_place_shapes(text: str, entry: list[Instruction]) -> set[str]:
    """Shapes of the arguments that results are written over, and of the same arrays seen otherwise."""
    aliased = {int(number) for number in re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", text[: text.index("\n")])}
    parameters = {
        int(number.group(1)): each
        for each in entry
        if each.kind == "parameter" and (number := re.search(r"parameter\((\d+)\)", each.line))
    }
    names = {parameters[number].name for number in aliased}
    shapes = {arrays_of(parameters[number].shape)[0] for number in aliased}
    for each in entry:
        if each.kind == "bitcast" and each.operands and each.operands[0] in names:
            names.add(each.name)
            shapes |= set(arrays_of(each.shape))
    return {shape for shape in shapes if bytes_of(shape) >= 2**16}


def arrays_of(shape: str) -> list[str]:
    """The arrays of a shape, without their layouts."""
    return re.findall(r"[a-z]+[0-9]*[a-z0-9]*\[[\d,]*\]", shape)
