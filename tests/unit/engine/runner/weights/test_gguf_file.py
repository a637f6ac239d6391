"""Reading GGUF: what is written comes back, and nothing broken gets past the reader."""

import math
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile, GgufTensor
from engine.runner.weights.stored_tensor import GROUP_SIZES, row_bytes
from tests.support.models.tokenizer_gguf import WriteGguf, write_tiny_gguf


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Write a tiny GGUF file; None as a value leaves out a metadata key or a tensor."""
    return partial(write_tiny_gguf, tmp_path / "tiny.gguf")


def test_metadata_of_every_type_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -300)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e-300)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve")
    writer.add_array("texts", ["a", "", "é"])
    writer.add_array("numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(path).metadata
    assert metadata == {
        "general.architecture": "llama",
        "u8": 200, "i8": -5, "u16": 65535, "i16": -300, "i32": -70000, "u64": 2**63,
        "i64": -(2**40), "f32": 0.5, "f64": 1e-300, "yes": True, "text": "naïve",
        "texts": ["a", "", "é"], "numbers": [1, -2, 3],
    }  # fmt: skip


@pytest.mark.parametrize("kind", GROUP_SIZES)
def test_tensors_come_back_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """Their values are those of `test_grouped_formats`."""
    shape = (3, 512)
    stored = np.random.default_rng(1).integers(0, 256, (3, row_bytes(kind, 512)), np.uint8)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(path).tensors["t"]
    assert (tensor.type_name, tensor.shape) == (kind, shape)
    groups = tensor.grouped()
    assert (groups.format, groups.shape) == (kind, shape)
    np.testing.assert_array_equal(groups.rows, stored)
    assert not groups.rows.flags.owndata  # mapped, not read


def test_every_truncation_is_an_error(write_gguf: WriteGguf, tmp_path: Path) -> None:
    whole = write_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 2200, 7), *range(2200, len(whole), 997), len(whole) - 33]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GgufFile(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(4, 2300), garbage=st.binary(min_size=1, max_size=16))
def test_garbage_in_the_header_is_an_error_or_harmless(
    write_gguf: WriteGguf, at: int, garbage: bytes
) -> None:
    path = write_gguf()
    content = bytearray(path.read_bytes())
    content[at : at + len(garbage)] = garbage
    path.write_bytes(content)
    try:
        tensors = GgufFile(path).tensors
    except CheckpointError:
        return
    for tensor in tensors.values():
        rows = tensor.grouped().rows
        assert rows.shape == (
            math.prod(tensor.shape[:-1]),
            row_bytes(tensor.type_name, tensor.shape[-1]),
        )
        assert rows.tobytes() == tensor.raw.tobytes()
    assert_read_where_described(list(tensors.values()), bytes(content))


def description(tensor: GgufTensor) -> bytes:
    """Return what a file says of a tensor, apart from where it is."""
    name, shape = tensor.name.encode(), tensor.shape[::-1]
    layout = f"<Q{len(name)}sI{len(shape)}QI"
    kind = gguf.GGMLQuantizationType[tensor.type_name]
    return struct.pack(layout, len(name), name, len(shape), *shape, kind)


def assert_read_where_described(tensors: list[GgufTensor], content: bytes) -> None:
    """Compare what was read with the file: tensors begin behind all descriptions, aligned."""
    described = {one.name: content.find(description(one)) for one in tensors}
    assert min(described.values(), default=0) >= 0, "a tensor that the file does not describe"
    offset_at = {one.name: described[one.name] + len(description(one)) for one in tensors}
    end = max(offset_at.values(), default=0) + 8
    start = -(-end // 32) * 32
    for one in tensors:
        at = start + struct.unpack_from("<Q", content, offset_at[one.name])[0]
        assert one.raw.tobytes() == content[at : at + one.raw.size]


HEADER = b"GGUF" + struct.pack("<I", 3)
LIST_OF_TWO = HEADER + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, 2)
HUGE = 2**61
MANY = 2**27
"""What a list of so many items would take fits into this machine's memory, and is noticed."""
MOST_BYTES = 1 << 18


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "empty"),
        (b"{}", "starts with bytes 7b 7d: wanted a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "wanted a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version 50331648"),
        (HEADER + struct.pack("<QQ", HUGE, 0), "tensor"),
        (HEADER + struct.pack("<QQ", 0, HUGE), "metadata key"),
        (HEADER + struct.pack("<QQQ", 0, 1, HUGE), "needs 2305843009213693952 bytes"),
        (HEADER + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, HUGE), "needs"),
        (LIST_OF_TWO + struct.pack("<Q1sQ", 1, b"a", HUGE), "k needs 2305843009213693952 bytes"),
        (LIST_OF_TWO + struct.pack("<Q1sQ1s", 1, b"a", 2, b"b"), "k needs 2 bytes where 1 are"),
        (LIST_OF_TWO + struct.pack("<Q1sI", 1, b"a", 0), "length of k needs 8 bytes where 4 are"),
        (LIST_OF_TWO + struct.pack("<Q1sQ1s", 1, b"a", 1, b"\xff"), "k is not UTF-8"),
        (HEADER + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 0, HUGE), "needs"),
        (HEADER + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 0, MANY), "needs 134217728 bytes"),
        (HEADER + struct.pack("<QQQ", 0, 1, MANY), "needs 134217728 bytes"),
        (HEADER + struct.pack("<QQQ1sIQQIQ", 1, 0, 1, b"t", 2, 32, MANY, 2, 0), "tensor t needs"),
        (HEADER + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 9, 1), "unsupported type 9"),
        (HEADER + struct.pack("<QQQ1sI", 0, 1, 1, b"k", 77), "unknown value type 77"),
        (HEADER + struct.pack("<QQQ1sI", 0, 1, 1, b"\xff", 4), "not UTF-8"),
        (HEADER + struct.pack("<QQQ1sI", 1, 0, 1, b"t", 9), "9 dimensions"),
        (HEADER + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, HUGE, 0, 0), "tensor t"),
        (HEADER + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 0, 0, 0), "shape (0,)"),
        (HEADER + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 33, 8, 0), "whole groups of 32"),
        (HEADER + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 896, 12, 0), "groups of 256 values"),
        (HEADER + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 32, 10, 0), "has the type 10"),
        (HEADER + struct.pack("<QQQ1sIQQIQ", 1, 0, 1, b"t", 2, 32, HUGE, 2, 0), "tensor t needs"),
        (
            HEADER + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 32, 999, 0),
            "has the type 999: supported is F32",
        ),
        (HEADER + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 1, 0, HUGE), "tensor t"),
    ],
)
def test_impossible_files_are_named_and_take_no_memory(
    tmp_path: Path, content: bytes, wanted: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            GgufFile(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MOST_BYTES
    assert wanted in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.gguf: cannot be read: No such file"):
        GgufFile(tmp_path / "no.gguf")


def test_values_of_another_type_name_key_and_value(write_gguf: WriteGguf) -> None:
    file = GgufFile(write_gguf({"s": "x", "n": 3, "flag": True, "list": [1, 2]}))
    for read, key, wanted in (
        (file.integer, "s", "key s is 'x': wanted an integer"),
        (file.integer, "flag", "key flag is True: wanted an integer"),
        (file.number, "s", "key s is 'x': wanted a finite number"),
        (file.text, "n", "key n is 3: wanted a string"),
        (file.texts, "list", r"key list is \[1, 2\]: wanted a list of strings"),
        (file.integers, "s", "key s is 'x': wanted a list of integers"),
        (file.text, "gone", "key gone is missing: wanted a string"),
    ):
        with pytest.raises(CheckpointError, match=wanted):
            read(key)
