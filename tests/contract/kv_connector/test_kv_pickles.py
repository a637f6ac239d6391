"""Objects in Python's own format, which run code when they are read, sent to a decode node."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from kv_transfer.receiving.effects import DropReason
from kv_transfer.wire.header_seal import seal
from tests.contract.kv_connector.raw_peer import (
    Raw,
    assert_others_are_served,
    dropped,
)
from tests.contract.kv_connector.raw_peer import decode as decode
from tests.contract.kv_connector.raw_peer import raw as raw
from tests.support.kv.kv_cluster import Cluster, Node


class Touching:
    """An object whose reading makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.covers("V02")
@pytest.mark.parametrize("has_session", [False, True])
@pytest.mark.parametrize("form", ["alone", "sealed", "packed", "payload"])
def test_an_object_that_runs_code_is_dropped_unread(
    zmq_cluster: Cluster, decode: Node, raw: Raw, tmp_path: Path, form: str, has_session: bool
) -> None:
    trap = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        code = pickle.dumps(Touching(trap), protocol)
        parts = {
            "alone": [code],
            "sealed": [seal(code)],
            "packed": [seal(msgpack.packb({"v": 4, "k": 1, "sender": code}))],
            "payload": [b"", code, code],
        }[form]
        if has_session:
            raw.hello()
        raw.socket.send_multipart(parts)
        raw.settle()
        assert (
            dropped(decode, DropReason.MALFORMED) + dropped(decode, DropReason.DAMAGED) > protocol
        )
    assert not trap.exists()
    pickle.loads(code)
    assert trap.exists(), "the trap works"
    assert_others_are_served(zmq_cluster, decode)
