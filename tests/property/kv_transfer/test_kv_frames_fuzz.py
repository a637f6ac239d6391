"""Nothing that arrives as a header raises anything but `PeerProtocolError`."""

from __future__ import annotations

import contextlib

import msgpack  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import PeerProtocolError
from kv_transfer.shared.limits import PROTOCOL_VERSION
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import seal
from tests.support.examples import everyday

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=5,
)
FIELDS = sorted({name for _, schema in frames.SCHEMAS.values() for name in schema})


@settings(max_examples=everyday(60, of=200), deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(header: bytes) -> None:
    with contextlib.suppress(PeerProtocolError):
        frames.decode(header)
    with contextlib.suppress(PeerProtocolError):
        frames.decode(seal(header))


@settings(max_examples=everyday(60, of=200), deadline=None)
@given(
    st.one_of(st.integers(0, 14), SCALARS),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8),
    st.one_of(st.just(PROTOCOL_VERSION), SCALARS),
)
def test_random_fields(kind: object, fields: dict[str, object], version: object) -> None:
    with contextlib.suppress(PeerProtocolError):
        frames.decode(seal(msgpack.packb({"v": version, "k": kind, **fields})))
