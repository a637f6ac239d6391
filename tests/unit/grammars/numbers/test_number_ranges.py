"""Ranges of numbers with fractions: what is in them can be written, and nothing else."""

from __future__ import annotations

import json
import math
from decimal import ROUND_DOWN, Decimal
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from grammars.texts import json_rule

BYTES = LLTokenizer("byte")


def compiled(schema: dict[str, Any], *, is_lenient: bool = False) -> LLMatcher:
    matcher = LLMatcher(BYTES, f"start: value\nvalue: {json_rule(schema, is_lenient=is_lenient)}")
    assert not matcher.get_error()
    return matcher


def takes(matcher: LLMatcher, text: str) -> bool:
    matcher, tokens = matcher.deep_copy(), BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.covers("G24")
@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"maximum": 0.95}, ["0.9", "0.95", "0.90", "0.949"], ["0.951", "0.96", "1"]),
        ({"minimum": 0, "maximum": 2.255}, ["2.2", "2.25", "2", "0"], ["2.26", "2.3", "-1"]),
        ({"minimum": -7.724}, ["-7.7", "-7.72", "-7.724"], ["-7.8", "-7.73"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.00001", "0.5"], ["0", "0.0", "0.6"]),
        ({"exclusiveMinimum": 2.0, "exclusiveMaximum": 2.31}, ["2.3", "2.01"], ["2", "2.31"]),
        ({"minimum": -9.2, "exclusiveMaximum": -9}, ["-9.1", "-9.2"], ["-9", "-9.0", "-9.3"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "-0.6"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.55}, ["0.5", "0.1"], ["0"]),
        ({"minimum": 0, "exclusiveMinimum": False, "maximum": 0.55}, ["0.5", "0"], ["0.6"]),
        ({"exclusiveMinimum": 0, "maximum": 1.5e-7}, ["0.0000001", "0.00000015"], ["0", "0.1"]),
        ({"exclusiveMinimum": 0, "maximum": 1.5e-290}, [], ["0", "0.1"]),
        ({"minimum": 2.2, "maximum": 2.25}, ["2.2", "2.21", "2.25"], ["2.1", "2.26"]),
        ({"exclusiveMinimum": 2.2, "maximum": 2.25}, ["2.21"], ["2.2", "2.20"]),
        ({"minimum": -2.25, "maximum": -2.2}, ["-2.2", "-2.21"], ["-2.1"]),
        ({"minimum": -2.25, "exclusiveMaximum": -2.2}, ["-2.21"], ["-2.2"]),
        ({"maximum": 0.95, "multipleOf": 0.5}, ["0.5", "0"], ["0.9", "0.95"]),
        ({"maximum": 0.95, "multipleOf": 0.01}, ["0.9", "0.90", "0.95"], ["0.96", "0.905"]),
        ({"multipleOf": 0.25}, ["0.5", "0.50", "0.25", "-1.5", "1"], ["0.1", "0.55", "0.251"]),
        ({"multipleOf": 0.125}, ["0.5", "0.25", "0.125", "2"], ["0.2", "0.15", "0.126"]),
        ({"minimum": 0.3, "maximum": 0.8, "multipleOf": 0.15}, ["0.3", "0.45", "0.6"], ["0.9"]),
        # The compiler refuses a `multipleOf` of 0.23, so 0.23 stays 0.230.
        ({"multipleOf": 0.023}, ["0.230", "0.023", "2.3"], ["0.24", "0.22"]),
        ({"type": ["number", "null"], "multipleOf": 0.25}, ["0.5", "null"], ["0.3"]),
        ({"exclusiveMinimum": 10**15, "maximum": 10**15 + 0.5}, [], ["1000000000000001"]),
        ({"type": ["number", "null"], "maximum": 0.95}, ["0.9", "null"], ["0.96", "1"]),
    ],
)
def test_what_is_in_a_range_can_be_written_and_nothing_else(
    bounds: dict[str, Any], inside: list[str], outside: list[str], is_lenient: bool
) -> None:
    matcher = compiled({"type": "number", **bounds}, is_lenient=is_lenient)
    assert [text for text in inside if not takes(matcher, text)] == []
    assert [text for text in outside if takes(matcher, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "number", "maximum": 0.95}, {"type": "string"}]},
        {"anyOf": [{"type": "null"}, {"type": "number", "maximum": 0.95, "title": "P"}]},
        {"allOf": [{"type": "number", "minimum": 0}, {"type": "number", "maximum": 0.95}]},
        {"$ref": "#/$defs/p", "$defs": {"p": {"type": "number", "maximum": 0.95}}},
    ],
)
def test_wherever_the_range_stands(schema: dict[str, Any]) -> None:
    matcher = compiled(schema)
    assert takes(matcher, "0.9")
    assert not takes(matcher, "0.96")


@pytest.mark.covers("G24")
@given(
    multiple=st.sampled_from([1, 2, 5, 8, 9, 12, 13, 15, 25, 32, 75, 99, 125, 128, 625]),
    places=st.integers(1, 4),
    low=st.integers(-9, 9) | st.none(),
)
def test_any_multiple(multiple: int, places: int, low: int | None) -> None:
    wanted = Decimal(multiple).scaleb(-places)
    schema = {"type": "number", "multipleOf": float(wanted)}
    if low is not None:
        schema["minimum"] = low / 10
    assume(not LLMatcher(BYTES, f"start: %json {json.dumps(schema)}").get_error())
    matcher = compiled(schema)
    for number in range(-30, 60):
        for size in range(places + 1):
            value = (number * wanted).quantize(Decimal(1).scaleb(-size), rounding=ROUND_DOWN)
            is_in = value % wanted == 0 and (low is None or value >= Decimal(low) / 10)
            text = f"{value.normalize():f}"
            assert text == "-0" or takes(matcher, text) is is_in, (schema, text)


NUMBERS = st.decimals(-12, 12, places=3).map(float) | st.integers(-12, 12)


@pytest.mark.covers("G24")
@given(near=st.tuples(NUMBERS, NUMBERS), names=st.tuples(st.booleans(), st.booleans()))
def test_any_range(near: tuple[float, float], names: tuple[bool, bool]) -> None:
    low, high = sorted(near)
    if high - low < 0.01:
        return
    schema = {
        "type": "number",
        "exclusiveMinimum" if names[0] else "minimum": low,
        "exclusiveMaximum" if names[1] else "maximum": high,
    }
    matcher = compiled(schema)
    for bound in (low, high):
        for places in range(4):
            first = math.floor(bound * 10**places)
            for number in range(first - 1, first + 3):
                value = Decimal(number).scaleb(-places).normalize()
                text = f"{value:f}"
                over = value > Decimal(str(low)) if names[0] else value >= Decimal(str(low))
                under = value < Decimal(str(high)) if names[1] else value <= Decimal(str(high))
                assert takes(matcher, text) is (over and under), (schema, text)


@pytest.mark.parametrize(
    "multiple", [0, 0.0, "0.25", True, math.inf, math.nan, 1e-40, 1e-300, 10**400]
)
def test_a_multiple_that_is_none_is_the_compilers_to_refuse(multiple: Any) -> None:
    rule = json_rule({"type": "number", "maximum": 0.95, "multipleOf": multiple})
    assert LLMatcher(BYTES, f"start: {rule}").get_error()


@pytest.mark.parametrize("kind", ["integer", "string", ["integer", "null"]])
def test_what_has_no_fractions_stays(kind: Any) -> None:
    assert "anyOf" not in json_rule({"type": kind, "multipleOf": 0.25, "maximum": 0.95})
