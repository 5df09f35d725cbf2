"""How many bytes a compiled program reads and writes, kernel by kernel, read from XLA's text.

A kernel reads its operands and writes its results once. Two kinds are not what their shapes say, and count as nothing:
what is updated in place (donated arrays, of which a step touches a few numbers), and the table that an embedding is
looked up in. Only what always runs is counted: a greedy step has no branches.
"""

import re
from collections import Counter
from dataclasses import dataclass

from jaxpage.runner.program_facts import bytes_of, entry_of

_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "partition-id", "after-all", "iota"}
_ENDS = ("-done",)
"""Second halves of operations that are counted where they start."""
PARTS = ("layer", "logits", "sample")
"""Named scopes of a step."""


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    line: str


def traffic_of(text: str) -> dict[str, int]:
    """Bytes that the program moves in one run, by part of the step; "other" is what belongs to none.

    What products leave of themselves to be added up counts apart, as "layer_partial_sums" and so on.
    """
    entry = _parse(entry_of(text))
    in_place = _in_place_shapes(text, entry)
    total: Counter[str] = Counter()
    shapes = {each.name: each.shape for each in entry}
    split: set[str] = set()
    for each in entry:
        if each.kind in _FREE or each.kind.endswith(_ENDS):
            continue
        moved = [each.shape, *(shapes[name] for name in each.operands if name in shapes)]
        if "/gather" in each.line and each.kind == "fusion":
            moved = [each.shape, each.shape]  # reads as much of the table as it writes
        part = _part_of(each.line)
        total[part] += sum(bytes_of(array) for shape in moved for array in _arrays(shape) if array not in in_place)
        # A product that is split along what it sums over leaves float32 parts, which another kernel adds.
        if re.match(r"gemm_fusion\S* = f32\[\d+,\d+,\d+\]", f"{each.name} = {each.shape}"):
            total[part] -= bytes_of(each.shape)
            total[f"{part}_partial_sums"] += 2 * bytes_of(each.shape)
            split.add(each.name)
        total[part] -= sum(bytes_of(shapes[name]) for name in each.operands if name in split)
    return dict(total)


def _part_of(line: str) -> str:
    scope = re.search(r'op_name="([^"]*)"', line)
    found = re.findall(r"[\w]+", scope.group(1)) if scope else []
    return next((part for part in PARTS if part in found), "other")


def _parse(body: str) -> list[_Instruction]:
    found = []
    for line in body.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)\)", line)
        if match:
            name, shape, kind, operands = match.groups()
            found.append(_Instruction(name, shape, kind, tuple(re.findall(r"%([\w.\-]+)", operands)), line))
    return found


def _in_place_shapes(text: str, entry: list[_Instruction]) -> set[str]:
    """Shapes of the arguments that results are written over, and of the same arrays seen otherwise."""
    aliased = {int(number) for number in re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", text[: text.index("\n")])}
    parameters = {
        int(number.group(1)): each
        for each in entry
        if each.kind == "parameter" and (number := re.search(r"parameter\((\d+)\)", each.line))
    }
    names = {parameters[number].name for number in aliased}
    shapes = {_arrays(parameters[number].shape)[0] for number in aliased}
    for each in entry:
        if each.kind == "bitcast" and each.operands and each.operands[0] in names:
            names.add(each.name)
            shapes |= set(_arrays(each.shape))
    return {shape for shape in shapes if bytes_of(shape) >= 2**16}


def _arrays(shape: str) -> list[str]:
    """The arrays of a shape, without their layouts."""
    return re.findall(r"[a-z]+[0-9]*[a-z0-9]*\[[\d,]*\]", shape)
