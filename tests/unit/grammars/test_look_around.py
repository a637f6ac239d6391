"""Known patterns with look-around take the same texts without it."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.compiler import GrammarCompiler
from grammars.look_around import without_look_around
from tests.unit.grammars.matching import follows

EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
TEXTS = ["".join(one) for size in range(6) for one in itertools.product("+.05a", repeat=size)]
TEXTS += ["".join(one) for one in itertools.product(".05", repeat=6)]


def decimal(max_digits: int | None, places: int | None) -> str:
    """What pydantic 2.13 writes for a `Decimal`."""
    start = r"^(?!^[-+.]*$)[+-]?0*"
    if max_digits is None:
        return start + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")
    ahead = rf"(?=[\d.]{{1,{max_digits + 1}}}0*$)"
    if places is None:
        return start + rf"(?:\d{{0,{max_digits}}}|{ahead}\d*\.\d*0*$)"
    whole = max(0, max_digits - places)
    return start + rf"(?:\d{{0,{whole}}}|{ahead}\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"


def without(pattern: str) -> str:
    part: dict[str, Any] = {"type": "string", "pattern": pattern}
    without_look_around(part)
    changed: str = part["pattern"]
    return changed


@pytest.mark.covers("K14")
@pytest.mark.parametrize("max_digits", [None, 0, 1, 2, 3, 5])
@pytest.mark.parametrize("places", [None, 0, 1, 2, 3])
def test_a_decimal_without_look_around_is_the_same_number(
    max_digits: int | None, places: int | None
) -> None:
    pattern = decimal(max_digits, places)
    changed = without(pattern)
    assert "(?!" not in changed
    assert "(?=" not in changed
    # Where a number of digits is limited, pydantic forgets the end of a number without a point.
    ended = re.sub(r"(\(\?:\\d\{0,\d+\})\|", r"\1$|", pattern)
    differing = [
        text for text in TEXTS if bool(re.search(ended, text)) != bool(re.search(changed, text))
    ]
    assert differing == []


@pytest.mark.covers("K14")
def test_an_address_without_look_around_is_the_same() -> None:
    changed = without(EMAIL)
    assert "(?!" not in changed
    locals_ = ["".join(one) for size in range(6) for one in itertools.product("a.'-", repeat=size)]
    hosts = ["b.de", "b.c.org", "-b.de", "b-.de", "b..de", ".de", "b.d", "b.d1", "de", "b.de."]
    for local, host in itertools.product(locals_, hosts):
        text = f"{local}@{host}"
        assert bool(re.search(EMAIL, text)) == bool(re.search(changed, text)), text


@pytest.mark.parametrize(
    "pattern", [r"^(?!a)b$", r"^a+$", "", decimal(65, None), EMAIL.replace("{2,}", "{3,}")]
)
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert without(pattern) == pattern
    other: dict[str, Any] = {"pattern": 5, "properties": {"pattern": {"type": "string"}}}
    before = json.dumps(other)
    without_look_around(other)
    assert json.dumps(other) == before


@pytest.mark.covers("K14")
@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        (decimal(None, None), ["1", "-1.5", ".5", "+00.10"], ["", ".", "1.2.3", "1a", "-"]),
        (decimal(10, 2), ["12345678.25", "-0.5", "0", ".10"], ["123456789", "1.234", "1 a"]),
        (decimal(3, None), ["1.25", "12.5", "125", ".125"], ["12.25", "1250", "1.2505"]),
        (EMAIL, ["a.b@c.de", "o'a@b.org"], ["a@b", ".a@b.de", "a..b@c.de", "a.@b.de"]),
    ],
)
def test_what_is_drawn_has_the_form_of_the_pattern(
    compiler: GrammarCompiler, part: str, right: list[str], wrong: list[str]
) -> None:
    schema = {"type": "string", "pattern": part}
    if part == EMAIL:
        schema["format"] = "email"
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole | {"additionalProperties": False}))
    for text in right:
        assert follows(compiler, grammar, json.dumps({"a": text})), text
    for text in wrong:
        assert not follows(compiler, grammar, json.dumps({"a": text})), text


def test_another_look_around_is_refused_as_before(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "pattern": "^(?!a)b$"}
    with pytest.raises(InvalidRequest, match="look-around"):
        follows(compiler, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), '"b"')
