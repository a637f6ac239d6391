"""Headers: every kind there and back, and every broken rule named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from common.errors import LayoutMismatch, PeerProtocolError
from common.ids import Incarnation
from common.kv.kv_layout import DTYPE_BYTES, KVLayout, LayerShape, check_compatible
from kv_transfer.shared.limits import (
    MAX_BLOCKS_PER_FRAME,
    MAX_DRAFT_TOKENS,
    MAX_HEADER_BYTES,
    MAX_LANE_BYTES,
    MAX_LANES,
    MAX_TEXT_CHARS,
    MAX_TRANSFERS_PER_LINK,
    PROTOCOL_VERSION,
)
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import SEAL_BYTES, DamagedHeader, seal

LAYOUT = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)
MOST = 2**64 - 1
FULL = tuple(range(MAX_BLOCKS_PER_FRAME))
DATA = frames.Data(
    seq=MOST,
    lease_token=MOST,
    generation=MOST,
    layer=2**16 - 1,
    ordinals=tuple(2**32 - 1 - n for n in FULL),
    runs=tuple(1 for _ in FULL),
    source_blocks=tuple(2**32 - 1 - n for n in FULL),
    sums=b"\xff" * (2 * frames.SUM_BYTES * MAX_BLOCKS_PER_FRAME),
)
ALL: list[frames.Frame] = [
    frames.Hello(
        Incarnation("p" * 256, 2**63 - 1),
        Incarnation("d", 0),
        LAYOUT,
        {f"lane{number}": bytes(MAX_LANE_BYTES) for number in range(MAX_LANES)},
        "auto",
    ),
    frames.Welcome(
        Incarnation("d", 7), "rdma", bytes(MAX_LANE_BYTES), 2**63 - 1, "commit", 2**32 - 1
    ),
    frames.Rejected("overloaded", "full"),
    frames.Begin(1, 2),
    DATA,
    frames.Ack(3, 2**63 - 1),
    frames.CommitFrame(1, 2, 3, MOST, 4, 5, tuple(range(MAX_DRAFT_TOKENS))),
    frames.Committed(1, 2),
    frames.Failed(1, 2, "handoff_failed", "why"),
    frames.Abort(1, 2),
    frames.Aborted(1, 2),
    frames.Ping(tuple(MOST - n for n in range(MAX_TRANSFERS_PER_LINK))),
    frames.Pong(),
    frames.Repeat(MOST, MOST, 2**16 - 1, tuple(2**32 - 1 - n for n in FULL)),
]


@pytest.mark.parametrize("frame", ALL, ids=lambda frame: type(frame).__name__)
def test_there_and_back(frame: frames.Frame) -> None:
    header = frames.encode(frame)
    assert len(header) <= MAX_HEADER_BYTES
    assert frames.decode(header) == frame


def test_long_texts_are_cut_to_what_a_peer_takes() -> None:
    decoded = frames.decode(frames.encode(frames.Rejected("c", "é" * 5000)))
    assert decoded == frames.Rejected("c", "é" * MAX_TEXT_CHARS)


def fields_of(frame: frames.Frame) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(frames.encode(frame)[:-SEAL_BYTES])
    return fields


def sealed(value: object) -> bytes:
    return seal(msgpack.packb(value))


def change(frame: frames.Frame, **changes: Any) -> bytes:
    body = {**fields_of(frame), **changes}
    return sealed({key: value for key, value in body.items() if value != "gone"})


def test_layouts_of_every_kind_travel_and_usual_ones_as_in_earlier_releases() -> None:
    hello = ALL[0]
    assert isinstance(hello, frames.Hello)
    assert list(LAYOUT_WIRE) == [
        "model_digest", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype"
    ]  # fmt: skip
    scaled = replace(hello.layout, dtype="int8")
    most = KVLayout.of_layers(
        (*(LayerShape(1, 2**16, 2**16),) * 1023, LayerShape(2, 1, 1)),
        model_digest="w",
        block_size=16,
        dtype="int8",
    )
    for layout in (scaled, most):
        header = frames.encode(replace(hello, layout=layout))
        assert len(header) <= MAX_HEADER_BYTES
        assert frames.decode(header) == replace(hello, layout=layout)


def test_a_cache_that_earlier_releases_do_not_know_is_refused_there_by_name() -> None:
    """They would not answer a HELLO whose dtype is none of theirs, or compares as their own."""
    hello = ALL[0]
    assert isinstance(hello, frames.Hello)
    ours = replace(hello.layout, dtype="int8")
    wire = fields_of(replace(hello, layout=ours))["layout"]
    known = {name: value for name, value in wire.items() if name != "stored"}
    assert list(known) == list(LAYOUT_WIRE)
    theirs = KVLayout(**known)
    assert theirs.dtype in DTYPE_BYTES
    for dtype in DTYPE_BYTES:
        with pytest.raises(LayoutMismatch, match="here 'm', peer 'm with KV in int8'"):
            check_compatible(replace(hello.layout, dtype=dtype), theirs)


def test_the_arithmetic_travels_and_earlier_releases_need_not_know_it() -> None:
    hello = ALL[0]
    assert isinstance(hello, frames.Hello)
    for dtype in ("float32", "int8"):
        ours = replace(hello.layout, dtype=dtype, arithmetic="float32 on numba")
        assert frames.decode(frames.encode(replace(hello, layout=ours))) == replace(
            hello, layout=ours
        )
    wire = fields_of(replace(hello, layout=replace(hello.layout, arithmetic="a" * 300)))["layout"]
    assert wire == {**LAYOUT_WIRE, "arithmetic": "a" * 256}
    for bad in (7, "a" * 257):
        with pytest.raises(PeerProtocolError, match=r"layout\.arithmetic is not a text"):
            frames.decode(change(hello, layout={**LAYOUT_WIRE, "arithmetic": bad}))


def test_a_welcome_of_an_earlier_release_allows_no_silence() -> None:
    assert frames.decode(change(WELCOME, quiet_s="gone")) == WELCOME
    assert WELCOME.quiet_s == 0


def test_an_acknowledgement_of_an_earlier_release_changes_no_window() -> None:
    assert frames.decode(change(frames.Ack(3, 4), window_bytes="gone")) == frames.Ack(3)


SMALL = frames.Data(0, 1, 1, 0, (0, 1), (2,), (), bytes(32))
BEGIN = frames.Begin(1, 2)
COMMIT = frames.CommitFrame(1, 2, 3, 9, 4, 5, ())
WELCOME = frames.Welcome(Incarnation("d", 7), "zmq", b"", 1, "off")
LAYOUT_WIRE = fields_of(ALL[0])["layout"]


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (change(BEGIN, v=1), f"version is 1: wanted {PROTOCOL_VERSION}"),
        (change(BEGIN, v="gone"), "version is None"),
        (change(BEGIN, v=True), "version is True"),
        (change(BEGIN, k=0), "kind 0"),
        (change(BEGIN, k="4"), "kind '4'"),
        (change(BEGIN, k=[4]), "kind"),
        (change(BEGIN, lease_token="gone"), "Begin.lease_token"),
        (change(BEGIN, lease_token=-1), "Begin.lease_token"),
        (change(BEGIN, lease_token=True), "Begin.lease_token"),
        (change(BEGIN, generation=1.0), "Begin.generation"),
        (change(COMMIT, num_tokens=2**32), "CommitFrame.num_tokens"),
        (change(COMMIT, draft_token_ids=[0] * (MAX_DRAFT_TOKENS + 1)), "draft_token_ids"),
        (change(COMMIT, draft_token_ids=5), "draft_token_ids"),
        (change(COMMIT, draft_token_ids=[None]), "draft_token_ids"),
        (change(SMALL, ordinals=[0, 0]), "Data.ordinals"),
        (change(SMALL, ordinals=[], runs=[], sums=b""), "Data.ordinals"),
        (change(SMALL, ordinals=[0, 2**32]), "Data.ordinals"),
        (change(SMALL, ordinals=list(range(MAX_BLOCKS_PER_FRAME + 1))), "Data.ordinals"),
        (change(SMALL, runs=[1]), "Data.runs"),
        (change(SMALL, runs=[2, 0]), "Data.runs"),
        (change(SMALL, sums=bytes(24)), "2 blocks and 24 bytes of sums"),
        (change(SMALL, sums=bytes(33)), "2 blocks and 33 bytes of sums"),
        (change(SMALL, sums=bytes(16 * MAX_BLOCKS_PER_FRAME + 1)), "Data.sums"),
        (change(SMALL, sums=[5, 6, 7, 8]), "Data.sums is not bytes"),
        (change(SMALL, sums="gone"), "Data.sums"),
        (change(SMALL, source_blocks=[3]), "2 blocks and 1 source_blocks"),
        (change(SMALL, source_blocks=[3, 2**32]), "Data.source_blocks"),
        (change(SMALL, layer=2**16), "Data.layer"),
        (change(COMMIT, digest=-1), "CommitFrame.digest"),
        (change(ALL[0], offers={}), "Hello.offers"),
        (change(ALL[0], offers="gone"), "Hello.offers"),
        (change(ALL[0], offers=[b""]), "Hello.offers"),
        (change(ALL[0], offers={str(n): b"" for n in range(MAX_LANES + 1)}), "Hello.offers"),
        (change(ALL[0], offers={"zmq": "text"}), "Hello.offers of a lane"),
        (change(ALL[0], offers={"zmq": bytes(MAX_LANE_BYTES + 1)}), "Hello.offers of a lane"),
        (change(ALL[0], offers={b"zmq": b""}), "Hello.offers"),
        (change(ALL[0], verify="always"), "Hello.verify is 'always'"),
        (change(ALL[0], verify="gone"), "Hello.verify is None"),
        (change(WELCOME, verify="auto"), "Welcome.verify is 'auto'"),
        (change(WELCOME, lane=5), "Welcome.lane"),
        (change(WELCOME, lane_reply="text"), "Welcome.lane_reply"),
        (change(WELCOME, lane_reply=bytes(MAX_LANE_BYTES + 1)), "Welcome.lane_reply"),
        (change(WELCOME, window_bytes=2**63), "Welcome.window_bytes"),
        (change(WELCOME, quiet_s=2**32), "Welcome.quiet_s"),
        (change(frames.Ack(1), window_bytes=-1), "Ack.window_bytes"),
        (change(ALL[0], sender=None), "Hello.sender"),
        (change(ALL[0], sender={"node_id": "x" * 257, "epoch": 1}), "Hello.sender.node_id"),
        (change(ALL[0], sender={"node_id": b"x", "epoch": 1}), "Hello.sender.node_id"),
        (change(ALL[0], receiver={"node_id": "x"}), "Hello.receiver.epoch"),
        (change(ALL[0], layout={**LAYOUT_WIRE, "head_dim": "8"}), "Hello.layout.head_dim"),
        (change(ALL[0], layout={**LAYOUT_WIRE, "dtype": "int3"}), "'int3'"),
        (change(ALL[0], layout={**LAYOUT_WIRE, "stored": 3}), "Hello.layout.stored"),
        (
            change(ALL[0], layout={**LAYOUT_WIRE, "stored": {"dtype": "int8"}}),
            "stored.model_digest",
        ),
        (
            change(
                ALL[0], layout={**LAYOUT_WIRE, "stored": {"model_digest": "w", "dtype": "int3"}}
            ),
            "'int3'",
        ),
        (change(ALL[0], layout={**LAYOUT_WIRE, "shapes": 3}), "Hello.layout.shapes"),
        (change(ALL[0], layout={**LAYOUT_WIRE, "shapes": [3]}), "Hello.layout.shapes"),
        (change(ALL[0], layout={**LAYOUT_WIRE, "shapes": [[1, 1]]}), "wanted 3"),
        (change(ALL[0], layout={**LAYOUT_WIRE, "shapes": [[1, 1, 1]] * 1025}), "1024 shapes"),
        (change(ALL[0], layout=[]), "Hello.layout"),
        (change(frames.Failed(1, 2, "c", "m"), code="x" * 65), "Failed.code"),
        (b"", "checksum"),
        (b"\xff" * 100, "checksum"),
        (frames.encode(BEGIN)[:-1], "checksum"),
        (frames.encode(BEGIN)[1:], "checksum"),
        (frames.encode(BEGIN) + b"\0", "checksum"),
        (frames.encode(BEGIN)[:-SEAL_BYTES], "checksum"),
        (frames.encode(BEGIN)[-SEAL_BYTES:], "checksum"),
        (seal(b""), "not msgpack"),
        (seal(msgpack.packb(fields_of(BEGIN))[:-1]), "not msgpack"),
        (seal(msgpack.packb(fields_of(BEGIN)) + b"\0"), "not msgpack"),
        (sealed({1: 2}), "not msgpack"),
        (sealed([1]), "not a map"),
        (seal(b"\xa2\xff\xff"), "not msgpack"),
        # Before there was a checksum; its sender is told why it is not understood.
        (msgpack.packb({"v": 1, "k": 1}), f"version is 1: wanted {PROTOCOL_VERSION}"),
        (b"\x00" * (MAX_HEADER_BYTES + 1), f"at most {MAX_HEADER_BYTES}"),
    ],
)
def test_a_broken_rule_is_named(header: bytes, named: str) -> None:
    with pytest.raises(PeerProtocolError, match=re.escape(named)) as caught:
        frames.decode(header)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("field", ["v", "k", "lease_token", "verify"])
@pytest.mark.parametrize("depth", [900, 1000, 1023, 1024, 5000])
def test_what_is_nested_too_deeply_to_be_printed(field: str, depth: int) -> None:
    """One frame of a stranger: printing its value in the error text recursed too deeply."""
    fields = {"v": b"\x02", "k": b"\x01" if field == "verify" else b"\x04"}
    fields[field] = b"\x91" * depth + b"\x00"
    if field == "verify":
        body = fields_of(ALL[0])
        fields |= {k: msgpack.packb(v) for k, v in body.items() if k not in ("v", "k", "verify")}
    header = bytes([0x80 | len(fields)])
    header += b"".join(msgpack.packb(name) + value for name, value in fields.items())
    with pytest.raises(PeerProtocolError):
        frames.decode(seal(header))


@pytest.mark.covers("F24")
@pytest.mark.parametrize("frame", ALL, ids=lambda frame: type(frame).__name__)
def test_one_wrong_byte_is_found_wherever_it_is(frame: frames.Frame) -> None:
    """In a token of a COMMIT it would be a wrong answer."""
    header = frames.encode(frame)
    places = {*range(min(len(header), 400)), *range(max(0, len(header) - 40), len(header))}
    for at in places:
        wrong = bytearray(header)
        wrong[at] ^= 1 << at % 8
        with pytest.raises(PeerProtocolError):
            frames.decode(bytes(wrong))


@pytest.mark.parametrize(
    "header", [b"", bytes(64), b"GET / HTTP/1.1\r\n\r\n", b"\x82\xa1w\x04" * 8]
)
def test_bytes_of_no_version_are_no_damaged_header(header: bytes) -> None:
    """Their connection ends for good; one whose header was damaged is opened again."""
    with pytest.raises(PeerProtocolError) as caught:
        frames.decode(header)
    assert not isinstance(caught.value, DamagedHeader)


def test_a_header_of_this_version_with_a_wrong_byte_is_a_damaged_one() -> None:
    header = bytearray(frames.encode(frames.Ack(7)))
    header[-SEAL_BYTES - 1] ^= 1
    with pytest.raises(DamagedHeader):
        frames.decode(bytes(header))
