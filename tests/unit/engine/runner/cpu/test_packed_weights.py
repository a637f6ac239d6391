"""Weights packed once into a file that is mapped: the same bytes on every load, or made anew."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.cpu import packed_weights
from engine.runner.cpu.packed_weights import SharedWeights, decoder_plans, pack_privately
from engine.runner.cpu.weight_memory import WeightMemory
from engine.runner.kernels.products.linear import gather_columns
from engine.runner.kernels.products.packed import PackedWeight
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.tensor_source import TensorSource
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

HEADER = packed_weights.HEADER_BYTES


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> TensorSource:
    return source_in(tmp_path / "model", family=getattr(request, "param", "ernie"))


def source_in(
    folder: Path, *, seed: int = 0, quantization: str = "Q4_1", family: str = "ernie"
) -> TensorSource:
    write_checkpoint(folder, CONFIGS[family], seed=seed)
    return QuantisedSource(Checkpoint(folder, read_decoder_spec(folder)), quantization)


def shared(source: TensorSource, folder: Path) -> dict[str, PackedWeight]:
    spec = read_decoder_spec(folder.parent / "model")
    return SharedWeights(source, decoder_plans(spec), folder).map(with_bytes=False)


def packed_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.packed")
    return path


def rows_of(weight: PackedWeight, count: int, width: int) -> np.ndarray:
    out = np.empty((count, width), np.float32)
    gather_columns(weight.table, np.arange(count), out)
    return out


@pytest.mark.parametrize("source", ["ernie", "ernie_moe"], indirect=True)
def test_the_file_holds_every_value_in_the_order_of_the_kernels(
    source: TensorSource, tmp_path: Path
) -> None:
    packed = shared(source, tmp_path / "packed")
    for plan in decoder_plans(read_decoder_spec(tmp_path / "model")):
        wanted = np.concatenate([dequantise(source.grouped(name)) for name in plan.names])
        np.testing.assert_array_equal(rows_of(packed[plan.key], *wanted.shape), wanted)


@pytest.mark.parametrize("source", ["ernie", "ernie_moe"], indirect=True)
def test_a_shared_file_has_the_bytes_of_private_memory(
    source: TensorSource, tmp_path: Path
) -> None:
    packed = shared(source, tmp_path / "packed")
    plans = decoder_plans(read_decoder_spec(tmp_path / "model"))
    private = pack_privately(source, plans, WeightMemory(), with_bytes=False)
    assert packed.keys() == private.keys()
    for key, weight in packed.items():
        assert not weight.data.flags.writeable
        np.testing.assert_array_equal(weight.data, private[key].data)


def test_another_order_of_heads_is_another_file(tmp_path: Path) -> None:
    """The weights are the same, and so is their identity."""
    packed = []
    for share in (0.5, 0.25):
        config = CONFIGS["glm"] | {"partial_rotary_factor": share}
        write_checkpoint(tmp_path / "model", config)
        spec = read_decoder_spec(tmp_path / "model")
        source = Checkpoint(tmp_path / "model", spec)
        packed.append(shared(source, tmp_path / "packed")["model.layers.0.qkv"].data.tobytes())
    assert packed[0] != packed[1]


def test_it_is_packed_once(
    source: TensorSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared(source, tmp_path / "packed")
    written = packed_file(tmp_path / "packed").read_bytes()
    monkeypatch.setattr(packed_weights, "pack_into", lambda *_: pytest.fail("packed again"))
    shared(source, tmp_path / "packed")
    assert packed_file(tmp_path / "packed").read_bytes() == written


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 64)


def change_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER + (len(content) - HEADER) // 2] ^= 1
    path.write_bytes(content)


def lose_the_header(path: Path) -> None:
    path.write_bytes(bytes(HEADER) + path.read_bytes()[HEADER:])


def take_another_key(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"key": "', b'"key": "0', 1)[: path.stat().st_size])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "harm", [cut, lengthen, change_a_bit, lose_the_header, take_another_key, remove]
)
def test_a_torn_or_foreign_file_is_made_anew(
    source: TensorSource,
    tmp_path: Path,
    harm: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "packed"
    shared(source, folder)
    path = packed_file(folder)
    written = path.read_bytes()
    harm(path)
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        packed = shared(source, folder)
    assert "made anew" in caplog.text
    assert packed_file(folder).read_bytes() == written
    assert b"".join(weight.data.tobytes() for weight in packed.values()) == written[HEADER:]


def test_the_file_of_another_model_is_made_anew(
    source: TensorSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is whole and of the right size, and lies where this model's belongs."""
    shared(source, tmp_path / "packed")
    path = packed_file(tmp_path / "packed")
    written = path.read_bytes()
    shared(source_in(tmp_path / "other" / "model", seed=1), tmp_path / "other" / "packed")
    foreign = packed_file(tmp_path / "other" / "packed").read_bytes()
    assert len(foreign) == len(written)
    path.write_bytes(foreign)
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        shared(source, tmp_path / "packed")
    assert "made anew" in caplog.text
    assert path.read_bytes() == written


def test_a_file_that_is_wrong_again_is_an_error(
    source: TensorSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared(source, tmp_path / "packed")
    cut(packed_file(tmp_path / "packed"))
    write = packed_weights._write

    def torn(path: Path, *arguments: object) -> None:
        write(path, *arguments)  # type: ignore[arg-type]
        cut(path)

    monkeypatch.setattr(packed_weights, "_write", torn)
    with pytest.raises(CheckpointError, match=r"weights\.packed: .* bytes: wanted .*made anew"):
        shared(source, tmp_path / "packed")


def test_other_weights_have_a_file_of_their_own(source: TensorSource, tmp_path: Path) -> None:
    shared(source, tmp_path / "packed")
    shared(source_in(tmp_path / "model", quantization="Q8_0"), tmp_path / "packed")
    shared(source_in(tmp_path / "model", seed=1), tmp_path / "packed")
    assert len(list((tmp_path / "packed").rglob("*.packed"))) == 3
