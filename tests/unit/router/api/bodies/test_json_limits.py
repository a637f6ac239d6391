"""The structure of a body is counted outside of its texts, and before anything is built from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from router.api.bodies import json_text
from router.api.bodies.json_text import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_MEMBERS,
    MAX_JSON_TEXTS,
    SMALL_BODY_BYTES,
    check_structure,
    checked_text,
)
from router.api.bodies.schemas import ChatBody, CompletionBody, parse_body
from tests.support.examples import everyday

MIB = 1 << 20


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * (MAX_JSON_CONTAINERS + 1), "32769 objects and lists: wanted at most 32768"),
        (b"[" + b"{}," * MAX_JSON_CONTAINERS + b"1]", "32769 objects and lists"),
        (b"{" + b'"":1,' * (MAX_JSON_MEMBERS + 1) + b"}", "65537 fields in its objects"),
        (b"[" + b'"",' * (MAX_JSON_TEXTS + 1) + b"]", "131073 texts"),
        (b"[" + b"1," * (2 * MIB + 1) + b"1]", "2097153 commas between its parts"),
        (b'["\\\\",' + b"[" * 40_000, "40001 objects"),
        (b'["\\"\\\\",' + b"[" * 40_000, "40001 objects"),
    ],
    ids=["lists", "objects", "members", "texts", "ids", "behind a backslash", "behind a quote"],
)
def test_too_much_structure_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_structure(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * (MAX_JSON_CONTAINERS - 1) + b"1]",
        b"[" + b'"",' * MAX_JSON_TEXTS + b"1]",
        json.dumps("[{:," * 100_000).encode(),
        json.dumps('"[{:\\,' * 100_000).encode(),
        json.dumps("\\" * 100_001 + "[" * 100_000).encode(),
        # A text that never ends has no structure behind it; what parses the body refuses it.
        b'"' + b'\\"' * 100_000 + b"[" * 100_000,
        json.dumps(list(range(500_000))).encode(),
        b"\xff" * MIB,
    ],
    ids=["lists", "texts", "brackets", "escapes", "backslashes", "open text", "ids", "noise"],
)
def test_what_texts_hold_is_not_structure(body: bytes) -> None:
    assert len(body) > SMALL_BODY_BYTES
    check_structure(body)


@settings(max_examples=everyday(40, of=100))
@given(
    st.recursive(
        st.text('"\\[]{}:,x') | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[{:', max_size=3), inner),
    )
)
def test_the_counts_are_those_of_the_parsed_body(value: Any) -> None:
    texts, containers, members = counted(value)
    limits = {
        "SMALL_BODY_BYTES": 0,
        "MAX_JSON_TEXTS": texts,
        "MAX_JSON_CONTAINERS": containers,
        "MAX_JSON_MEMBERS": members,
    }
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        for name, most in limits.items():
            patch.setattr(json_text, name, most)
        check_structure(body)
        for name in [name for name in limits if limits[name] and name != "SMALL_BODY_BYTES"]:
            patch.setattr(json_text, name, limits[name] - 1)
            with pytest.raises(InvalidRequest):
                check_structure(body)
            patch.setattr(json_text, name, limits[name])


def counted(value: Any) -> tuple[int, int, int]:
    """Texts (names too), objects and lists, and members."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    sums = [sum(column) for column in zip(*parts, strict=True)] or [0, 0, 0]
    names = len(value) if isinstance(value, dict) else 0
    return sums[0] + names, sums[1] + 1, sums[2] + names


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (ChatBody, '"messages": [' + "1," * MIB + "1]", "messages.0: input should be"),
        (ChatBody, '"messages": [], "stop": [' + "1," * MIB + "1]", "stop has the wrong type"),
        (
            CompletionBody,
            '"prompt": "", "stop_token_ids": [' + "1.5," * MIB + "1]",
            "stop_token_ids",
        ),
    ],
)
def test_a_million_faults_cost_as_much_as_the_first(kind: Any, fields: str, said: str) -> None:
    """Without a stop at the first fault this takes minutes and gigabytes."""
    body = ('{"model": "t", ' + fields + "}").encode()
    with pytest.raises(InvalidRequest, match=said):
        parse_body(kind, checked_text(body))
