"""Weights are read by shard, in their own type, out of nested pieces, and as int8 where they are declared so."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import loading_on_devices as example
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxpage.models.checkpoints.safetensors import SafetensorsCheckpoint
from jaxpage.models.checkpoints.weightless import DummyWeights
from jaxpage.models.stored import Box, Join, Source
from jaxpage.models.weights import Weight, load_params, param_shapes, weight
from jaxpage.ops.matmul import embed_rows, linear
from jaxpage.ops.quantized import QuantizedWeight, channel_scale, to_int8

SIZES = {name: int(np.prod(shape)) * 4 for name, shape in example.TENSORS.items()}
"""Bytes of each tensor, all stored in float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in four files."""
    path, rng = tmp_path_factory.mktemp("sharded"), np.random.default_rng(1)
    (path / "config.json").write_text("{}")
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in example.TENSORS.items()}
    file_of = {name: f"model-{1 + i % 4:05d}-of-00004.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return path


def load_in_processes(folder: Path, num_processes: int) -> list[dict[str, Any]]:
    """What each of the processes, which have four devices together, prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(4 // num_processes)}
    command = [sys.executable, example.__file__, folder, str(num_processes)]
    running = [
        subprocess.Popen([*command, str(i), address], env=os.environ | settings, stdout=subprocess.PIPE, text=True)
        for i in range(num_processes)
    ]
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * num_processes
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.fixture(scope="module")
def one_process(folder: Path) -> dict[str, Any]:
    return load_in_processes(folder, 1)[0]


def test_a_process_reads_what_its_devices_hold_and_nothing_else(folder: Path) -> None:
    for found in load_in_processes(folder, 2):
        read = found["read"]
        assert found["wrong"] == []
        assert found["as_declared"]
        assert read.pop("norm") == SIZES["norm"]  # both devices of a process have all of it
        assert read.pop("fused") == SIZES["fused"] / 3 / 2  # a third of it is used
        assert read.pop("k") == SIZES["k"]  # one of two heads, on each of two devices
        assert read == {name: SIZES[name] / 2 for name in read}


def test_four_devices_of_a_process_read_each_part_once(one_process: dict[str, Any]) -> None:
    read = one_process["read"]
    assert one_process["wrong"] == []
    assert one_process["as_declared"]
    assert read.pop("fused") == SIZES["fused"] / 3
    assert read.pop("k") == 2 * SIZES["k"]  # two copies of each head, on a device of its own
    assert read == {name: SIZES[name] for name in read}


def test_little_but_the_largest_shard_is_held_on_the_host(one_process: dict[str, Any]) -> None:
    largest = max(SIZES["embed"], sum(SIZES[name] for name in SIZES if name[:2] in ("ga", "up"))) / 2  # in bfloat16
    assert one_process["transient"]["one"] < 1.1 * largest
    assert one_process["transient"]["four"] < 1.1 * largest / 4


def test_int8_on_four_devices_is_as_near_as_rounding_allows(one_process: dict[str, Any]) -> None:
    assert 0 < one_process["quantized"]["lookup"] <= 1.001
    assert 0 < one_process["quantized"]["product"] <= 1.001


class Memory:
    """A checkpoint of arrays."""

    def __init__(self, **tensors: np.ndarray) -> None:
        self.path, self.config, self.generation_config = Path("memory"), dict[str, Any](), dict[str, Any]()
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        assert self._tensors[name].shape == shape
        return self._tensors[name][index]


def all_boxes(shape: tuple[int, ...]) -> list[Box]:
    boxes: list[Box] = [()]
    for size in shape:
        parts = [range(start, stop) for start in range(size) for stop in range(start + 1, size + 1)]
        boxes = [(*box, part) for box in boxes for part in parts]
    return boxes


@pytest.mark.parametrize(
    "source",
    [
        Source("t", (12, 4), (12, 4)),
        Source("t", (12, 4), (2, 3, 2, 4)),
        Source("t", (12, 4), (3, 1, 4, 4)),
        Source("t", (12, 4), (1, 1, 12, 2, 2)),
        Source("t", (12, 4), (3, 4, 4), copies=2),
        Source("t", (12, 4), (3, 2, 2), index=(slice(3, 9), slice(1, 3))),
        Source("t", (12,), (3, 2, 2)),
        Source("t", (12, 1), (2, 6, 1)),
    ],
    ids=lambda source: f"{source.view}-{source.copies}-{len(source.index)}",
)
def test_every_box_of_a_source_is_that_part_of_the_whole(source: Source) -> None:
    stored = np.arange(np.prod(source.shape)).reshape(source.shape)
    whole = np.repeat(stored[source.index].reshape(source.view), source.copies, axis=0)
    assert source.filled_shape == whole.shape
    for box in all_boxes(whole.shape):
        index = tuple(slice(positions.start, positions.stop) for positions in box)
        np.testing.assert_array_equal(source.read(Memory(t=stored), box), whole[index])


def test_nested_pieces_are_joined_each_along_its_own_axis() -> None:
    tensors = {name: np.full((2, 3), value, np.float32) for value, name in enumerate("abcd")}
    one = [Source(name, (2, 3), (1, 1, 2, 3)) for name in tensors]
    nested = Weight((Join(tuple(one[:2]), axis=1), Join(tuple(one[2:]), axis=1)), ("part", "part", "ffn", "embed"))
    array = load_params(nested, Memory(**tensors), np.dtype(np.float32), Mesh(np.array(jax.devices()[:1]), ("tp",)))
    assert array.shape == nested.shape == (2, 2, 2, 3)
    np.testing.assert_array_equal(array[:, :, 0, 0], [[0, 1], [2, 3]])


def test_a_weight_larger_than_what_is_converted_at_once_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpage.models.weights._CHUNK", 10)
    stored = np.arange(96, dtype=np.float32).reshape(24, 4)
    declared = Weight((Source("t", (24, 4), (2, 3, 4, 4)),), ("part", "head", "head_dim", "embed"))
    array = load_params(declared, Memory(t=stored), np.dtype("bfloat16"), Mesh(np.array(jax.devices()[:1]), ("tp",)))
    np.testing.assert_array_equal(np.asarray(array, np.float32).reshape(24, 4), stored)


def test_a_weight_may_have_a_type_of_its_own_and_the_loader_a_table_of_its_own() -> None:
    declared = {
        "own": weight("t", (4, 2), ("rows", "columns"), dtype=np.dtype(np.float32)),
        "common": weight("t", (4, 2), ("rows", "columns")),
    }
    mesh, axes = Mesh(np.array(jax.devices()[:1]), ("model",)), {"rows": "model", "columns": None}
    checkpoint, dtype = Memory(t=np.ones((4, 2), np.float32)), np.dtype("bfloat16")
    params = load_params(declared, checkpoint, dtype, mesh, axes)
    shapes = param_shapes(declared, dtype, mesh, axes)
    for tree in (params, shapes):
        assert tree["own"].dtype == np.float32
        assert tree["common"].dtype == dtype
        assert tree["own"].sharding.spec == jax.P("model", None)


def test_a_part_of_a_safetensors_tensor_is_a_view_of_the_file(folder: Path) -> None:
    checkpoint, shape = SafetensorsCheckpoint(folder), example.TENSORS["down"]
    whole = checkpoint.read("down", shape)
    for index in ((slice(3, 9),), (slice(None), slice(5, 7))):
        part = checkpoint.read("down", shape, index)
        assert np.shares_memory(part, whole)
        np.testing.assert_array_equal(part, whole[index])


@pytest.mark.parametrize("index", [(), (slice(5, 300),), (slice(1023, 1030), slice(2, 700))], ids=str)
def test_a_part_of_a_dummy_tensor_is_that_part_of_the_whole(folder: Path, index: tuple[slice, ...]) -> None:
    checkpoint, shape = DummyWeights(folder), (1100, 1000)  # more numbers than are drawn
    np.testing.assert_array_equal(checkpoint.read("t", shape, index), checkpoint.read("t", shape)[index])


@pytest.fixture
def int8() -> tuple[np.ndarray, QuantizedWeight]:
    """A weight [2, 20, 48], one of whose channels is zero, and the same in int8."""
    values = np.random.default_rng(3).normal(size=(2, 20, 48)).astype(np.float32)
    values[1, 3] = 0
    scale = channel_scale(np.abs(values).max(axis=-1))
    return values, QuantizedWeight(jax.numpy.asarray(to_int8(values, scale)), jax.numpy.asarray(scale), values.dtype)


def test_int8_values_are_within_half_a_step_and_use_the_whole_range(int8: tuple[np.ndarray, QuantizedWeight]) -> None:
    values, quantized = int8
    scale = np.asarray(quantized.scale)[..., None]
    assert np.all(np.abs(np.asarray(quantized.values) * scale - values) <= scale * 0.5001)
    largest = np.abs(np.asarray(quantized.values, np.int32)).max(axis=-1)
    assert largest[1, 3] == 0
    assert np.sum(largest == 127) == largest.size - 1


@pytest.mark.parametrize("num_tokens", [3, 64])
def test_a_product_with_int8_is_that_of_the_values_it_stands_for(
    int8: tuple[np.ndarray, QuantizedWeight], num_tokens: int
) -> None:
    quantized = int8[1]
    x = np.random.default_rng(4).normal(size=(num_tokens, 48)).astype(np.float32)
    exact = np.asarray(quantized.values) * np.asarray(quantized.scale)[..., None]
    bias = np.ones(exact.shape[:-1], np.float32)
    np.testing.assert_allclose(linear(x, quantized, bias), np.einsum("ti,poi->tpo", x, exact) + bias, atol=1e-4)
    assert linear(x.astype("bfloat16"), quantized).dtype == jax.numpy.bfloat16


def test_rows_looked_up_in_int8_have_the_type_of_the_weight() -> None:
    table = QuantizedWeight(jax.numpy.ones((4, 3), "int8"), jax.numpy.arange(4.0), np.dtype("bfloat16"))
    rows = embed_rows(table, jax.numpy.array([2, 0]))
    assert rows.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(rows, [[2, 2, 2], [0, 0, 0]])
