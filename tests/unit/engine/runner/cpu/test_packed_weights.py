"""Weights packed once into a file that is mapped: the same bytes on every load, or made anew."""

from __future__ import annotations

import json
import logging
import os
import weakref
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
from engine.runner.weights.derived import fused_experts, fused_weights
from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import GroupedTensor
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
    """The weights are the same files, so their identity is the same."""
    packed = []
    folder = write_checkpoint(tmp_path / "model", CONFIGS["glm"])
    for share in (0.5, 0.25):
        config = CONFIGS["glm"] | {"partial_rotary_factor": share}
        (folder / "config.json").write_text(json.dumps(config))
        source = Checkpoint(folder, read_decoder_spec(folder))
        packed.append(shared(source, tmp_path / "packed")["model.layers.0.qkv"].data.tobytes())
    assert packed[0] != packed[1]


class Counted(DerivedWeights):
    """The weights of a source, and the most of them that were in memory when one was read."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source)
        self._rows: list[weakref.ref[np.ndarray]] = []
        self.most = 0

    def grouped(self, name: str) -> GroupedTensor:
        self.most = max(self.most, sum(rows() is not None for rows in self._rows))
        found = super().grouped(name)
        self._rows.append(weakref.ref(found.rows))
        return found


@pytest.mark.parametrize("source", ["ernie_moe"], indirect=True)
def test_experts_are_read_one_at_a_time(source: TensorSource, tmp_path: Path) -> None:
    """All experts of a layer would take gigabytes beside the file that they are packed into."""
    of_file, of_memory = Counted(source), Counted(source)
    shared(of_file, tmp_path / "packed")
    plans = decoder_plans(read_decoder_spec(tmp_path / "model"))
    pack_privately(of_memory, plans, WeightMemory(), with_bytes=False)
    assert (of_file.most, of_memory.most) == (1, 1)


@pytest.mark.parametrize("module", [fused_experts, fused_weights])
def test_code_that_reads_weights_names_the_file(module: object) -> None:
    """A file that was packed before such code was mended is made anew."""
    assert module in packed_weights.CODE


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
