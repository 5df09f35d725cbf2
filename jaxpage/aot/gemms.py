"""The matrix products of a compiled program for GPUs, and how XLA has cut each into tiles, read from its text."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpage.aot.facts import entry_of
from jaxpage.aot.traffic import bodies_of
from jaxpage.ops.gemm_launch import GemmLaunch

_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "s8": 1}


@dataclass(frozen=True)
class Gemm:
    """A product [rows, depth] x [depth, columns], summed up in `splits` parts. Of one device."""

    name: str
    rows: int
    """Tokens."""
    columns: int
    """Weights' outputs."""
    depth: int
    """What is summed over, in all parts together."""
    splits: int
    """Parts of the sum, which another kernel adds."""
    batch: int
    """Products like it in the same kernel; 1 but for products of several matrices."""
    item_bytes: int
    """Of an operand's number."""
    result_bytes: int
    """Of a result's number."""
    tile_rows: int
    tile_columns: int
    tile_depth: int
    num_warps: int
    num_stages: int
    uses_tma: bool

    @property
    def num_ctas(self) -> int:
        tiles = -(-self.rows // self.tile_rows) * -(-self.columns // self.tile_columns)
        return tiles * self.splits * self.batch

    @property
    def weight_bytes(self) -> int:
        return self.batch * self.columns * self.depth * self.item_bytes

    @property
    def operand_bytes(self) -> int:
        """Of both operands, each once."""
        return self.weight_bytes + self.batch * self.rows * self.depth * self.item_bytes

    @property
    def tile_operand_bytes(self) -> int:
        """What all tiles read together: an operand as often as tiles of the other one need it."""
        return self.num_ctas * (self.tile_rows + self.tile_columns) * (self.depth // self.splits) * self.item_bytes

    @property
    def stage_bytes(self) -> int:
        """Of one step along the depth, in shared memory."""
        return (self.tile_rows + self.tile_columns) * self.tile_depth * self.item_bytes

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.columns * self.depth

    @property
    def output_bytes(self) -> int:
        return self.batch * self.splits * self.rows * self.columns * self.result_bytes


def gemms_of(text: str) -> list[Gemm]:
    """Every product that XLA compiles itself, in the order of their launches. text: of a compiled program.

    Products in libraries have no tiles here: see `num_library_products`.
    """
    bodies = bodies_of(text)
    entry = entry_of(text)
    found = []
    for line in entry.splitlines():
        called = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .* fusion\(.*calls=%?([\w.\-]+)", line)
        if called and "__triton" in line and (dot := _dot_in(bodies[called.group(2)])):
            found.append(_read(called.group(1), line, dot, bodies[called.group(2)]))
    return found


def main_launch(gemms: Sequence[Gemm]) -> GemmLaunch | None:
    """The tiles of the product that reads the most, which most of a step's time goes to; None where there is none."""
    if not gemms:
        return None
    it = max(gemms, key=lambda gemm: gemm.operand_bytes)
    return GemmLaunch(it.tile_rows, it.tile_columns, it.tile_depth, it.num_stages, it.num_warps, it.uses_tma)


def num_library_products(text: str) -> int:
    """Products that cuBLAS or cuDNN do."""
    return len(re.findall(r'custom_call_target="__(?:cublas|cudnn)\$', text))


def _dot_in(body: str) -> str | None:
    return next((line for line in body.splitlines() if re.search(r"\sdot\(", line)), None)


def _read(name: str, line: str, dot: str, body: str) -> Gemm:
    config = json.loads(line[line.index("backend_config=") + len("backend_config=") :])
    tiling = config["fusion_backend_config"]["block_level_fusion_config"]
    *_, tile_rows, tile_columns = (int(size) for size in tiling["output_tiles"][0]["sizes"])
    tile_depth = int(re.findall(r'backend_config=\{"sizes":\["(\d+)"\]', dot)[0])
    (result, sizes), (left, left_sizes), (_, right_sizes) = _shapes_of(dot, body)
    summed, grouped = _numbers(dot, "lhs_contracting_dims"), _numbers(dot, "lhs_batch_dims")
    sides = [
        math.prod(size for axis, size in enumerate(own) if axis not in left_out)
        for own, left_out in (
            (left_sizes, summed + grouped),
            (right_sizes, _numbers(dot, "rhs_contracting_dims") + _numbers(dot, "rhs_batch_dims")),
        )
    ]
    parts = math.prod(left_sizes[axis] for axis in grouped)
    # Few rows are multiplied as float32 where the result is; what is read is what the program keeps.
    left = _kept_type(body, left_sizes) or left
    # Parts of one sum are written as float32 for another kernel to add; a product of several matrices is not.
    splits = parts if result == "f32" and left != "f32" else 1
    # With few rows XLA swaps operands, and writes the result as it was asked for all the same.
    *_, rows, columns = _output_sizes(line)
    assert sorted((rows, columns)) == sorted(sides), f"{name}: a product of {sides} gives {rows} x {columns}: {sizes}"
    return Gemm(
        name=name,
        rows=rows,
        columns=columns,
        depth=splits * math.prod(left_sizes[axis] for axis in summed),
        splits=splits,
        batch=parts // splits,
        item_bytes=_ITEM_BYTES.get(left, 4),
        result_bytes=_ITEM_BYTES.get(result, 4),
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        tile_depth=tile_depth,
        num_warps=int(tiling["num_warps"]),
        num_stages=int(tiling["num_stages"]),
        uses_tma=bool(tiling["is_tma_allowed"]),
    )


def _shapes_of(dot: str, body: str) -> list[tuple[str, list[int]]]:
    """Element type and sizes of a dot's result and operands."""
    result = re.search(r"= (\w+)\[([\d,]*)\]", dot)
    operands = re.search(r"\sdot\(%?([\w.\-]+), %?([\w.\-]+)\)", dot)
    assert result is not None
    assert operands is not None
    found = [result]
    for operand in operands.groups():
        shape = re.search(rf"^\s+(?:ROOT )?%?{re.escape(operand)} = (\w+)\[([\d,]*)\]", body, re.MULTILINE)
        assert shape is not None
        found.append(shape)
    return [(match.group(1), [int(n) for n in match.group(2).split(",") if n]) for match in found]


def _kept_type(body: str, sizes: list[int]) -> str | None:
    """Element type of the argument that has so many numbers, before the product converts it."""
    for kind, dims in re.findall(r"= (\w+)\[([\d,]*)\]\S* parameter\(", body):
        if math.prod(int(n) for n in dims.split(",") if n) == math.prod(sizes):
            return str(kind)
    return None


def _output_sizes(line: str) -> list[int]:
    shape = re.search(r"= \w+\[([\d,]+)\]", line)
    assert shape is not None, line
    return [int(n) for n in shape.group(1).split(",")]


def _numbers(line: str, name: str) -> list[int]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", line)
    return [int(n) for n in found.group(1).split(",") if n] if found else []
