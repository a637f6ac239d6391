"""Grammars of dates take exactly the dates of `datetime.date`."""

from __future__ import annotations

import json
import re
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.compiler import GrammarCompiler
from grammars.dates import DATE, add_calendar
from grammars.schema_walk import copied_parts
from router.tools.definitions import Tool, ToolUse
from router.tools.formats import FORMATS
from router.tools.grammars import GrammarWriter
from router.tools.thinking import ThinkingFormat
from tests.support.engine import hash_grammars
from tests.unit.grammars.matching import follows


def with_calendar(schema: dict[str, Any]) -> dict[str, Any]:
    whole = dict(schema)
    for part in copied_parts(whole):
        add_calendar(part)
    return whole


DAY = {"type": "string", "format": "date"}
MOMENT = {"type": "string", "format": "date-time"}
DAYS = {
    "1900-02-28": True,
    "1900-02-29": False,
    "2000-02-29": True,
    "2023-02-29": False,
    "2024-02-29": True,
    "2024-02-30": False,
    "2100-02-29": False,
    "0000-01-01": False,
    "0000-02-29": False,
    "0001-01-01": True,
    "0004-02-29": True,
    "0400-02-29": True,
    "1000-01-01": True,
    "9999-12-31": True,
    "2024-04-31": False,
    "2024-00-10": False,
    "2024-13-10": False,
    "2024-01-00": False,
    "2024-1-1": False,
    "2024-01-011": False,
}
COMPILER: GrammarCompiler = hash_grammars.compiler()


def takes_value(schema: Any, value: Any) -> bool:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return follows(COMPILER, grammar, json.dumps(value))


def is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@pytest.mark.parametrize("text", DAYS)
def test_days_at_the_edges(text: str) -> None:
    assert is_date(text) is DAYS[text]
    assert takes_value(DAY, text) is DAYS[text]
    assert takes_value(MOMENT, f"{text}T23:59:59Z") is DAYS[text]


def test_the_pattern_takes_the_dates_of_all_years() -> None:
    pattern = re.compile(DATE)
    for year in range(10_000):
        for month, days in ((1, (0, 31, 32)), (2, (28, 29, 30)), (4, (30, 31)), (12, (31,))):
            for day in days:
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(pattern.fullmatch(text)) is is_date(text), text


def test_the_pattern_takes_every_day_of_four_hundred_years() -> None:
    pattern, day = re.compile(DATE), date(1801, 1, 1)
    for _ in range(400 * 365 + 97):
        assert pattern.fullmatch(day.isoformat()), day
        day += timedelta(days=1)


@given(st.integers(0, 9999), st.integers(0, 14), st.integers(0, 33))
def test_the_grammar_takes_what_the_calendar_has(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    assert takes_value(DAY, text) is is_date(text)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"enum": DAY, "const": DAY}},
        {"properties": {"enum": {"type": ["string", "null"], "format": "date"}}},
        {"properties": {"enum": {"anyOf": [{"type": "integer"}, DAY]}}},
        {"properties": {"enum": {"allOf": [DAY, {"maxLength": 10}]}}},
        {"$defs": {"day": DAY}, "properties": {"enum": {"$ref": "#/$defs/day"}}},
        {"components": {"x": {"day": DAY}}, "additionalProperties": {"$ref": "#/components/x/day"}},
        {"patternProperties": {"^e": DAY}},
    ],
)
def test_wherever_the_format_stands(schema: Any) -> None:
    whole = {"type": "object", **schema}
    before = json.dumps(whole)
    assert takes_value(whole, {"enum": "2024-02-29"})
    assert not takes_value(whole, {"enum": "2023-02-29"})
    assert json.dumps(whole) == before


def test_lists() -> None:
    schema = {"type": "array", "prefixItems": [DAY], "items": MOMENT}
    assert takes_value(schema, ["2024-02-29", "2024-02-29T00:00:00.5+01:00"])
    assert not takes_value(schema, ["2023-02-29"])
    assert not takes_value(schema, ["2024-02-29", "2023-02-29T00:00:00.5+01:00"])


def test_arguments_of_tools() -> None:
    parameters = {"type": "object", "properties": {"day": DAY}, "required": ["day"]}
    tool = Tool(name="book", description=None, parameters=parameters)
    use = ToolUse(tools=(tool,), callable_names=frozenset({"book"}), must_call=True)
    form = FORMATS["llama3_json"]
    grammar = Grammar(
        GrammarKind.LARK, GrammarWriter({}).calls(form, use, ThinkingFormat.NONE), "tools"
    )
    call = '{"name": "book", "parameters": {"day": "%s"}}'
    assert follows(COMPILER, grammar, call % "2024-02-29")
    assert not follows(COMPILER, grammar, call % "2023-02-29")


def test_other_keywords_keep_their_meaning() -> None:
    own = {"type": "string", "format": "date", "pattern": "^2023"}
    assert with_calendar(own) == own
    assert takes_value(own, "2023-02-28")
    assert not takes_value(own, "2024-02-28")
    for value in ({"format": "date"}, [{"format": "date"}]):
        for data in ({"const": value}, {"enum": [value]}, {"default": value}):
            assert with_calendar(data) == data
    assert takes_value({"const": {"format": "date"}}, {"format": "date"})
    assert takes_value({"format": "date"}, 7), "a format is one of texts alone"
    with pytest.raises(InvalidRequest, match="Unsatisfiable"):
        takes_value({**DAY, "maxLength": 9}, "2024-1-1")
    with pytest.raises(InvalidRequest, match="Unsatisfiable"):
        takes_value({**DAY, "const": "2023-02-29"}, "2023-02-29")
