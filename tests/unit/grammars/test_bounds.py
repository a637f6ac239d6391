"""What is counted of a grammar before it is compiled, and with which place it is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from grammars.bounds import MAX_EMBEDDED, MAX_MULTIPLE, MAX_OPTIONAL, check_bounds, check_lark
from tests.support.grammars.hostile_grammars import BOUNDED, HOSTILE, SIBLINGS

PLACES = {
    "many optional properties in Lark": "3500 optional properties at #:",
    "many optional properties behind a text": "3500 optional properties at #:",
    "many optional properties in nested Lark": "3500 optional properties at #:",
    "one required name many times": "2999 optional properties at #:",
    "a large remainder": "a `multipleOf` of 1000003 at #:",
    "a remainder of many digits": "a `multipleOf` of 0.1234567 at #:",
    "the least integer": "the number -9223372036854775808 at #/const:",
    "an integer that rounds to it": "the number -9223372036854775806 at #/enum/1:",
    "the least integer in Lark": "the number -9223372036854775808 at #/const:",
    "many patterns at once": "26 patterns at #/allOf:",
    "many levels in Lark": "more than 64 levels:",
    "very many schemas": "more than 257 JSON schemas:",
}


def check(grammar: Grammar) -> None:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_bounds(json.loads(grammar.text), "field")
    elif grammar.kind is GrammarKind.LARK:
        check_lark(grammar.text, "field")


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_counted_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(BOUNDED[name])
    assert PLACES[name] in str(refused.value)
    assert "wanted " in str(refused.value)
    assert refused.value.param == "field"


@pytest.mark.parametrize("name", [*HOSTILE, *SIBLINGS])
def test_what_is_left_to_the_compiler_is_counted_in_no_time(name: str) -> None:
    grammar = {**HOSTILE, **SIBLINGS}[name]
    began_s = time.thread_time()
    check(grammar)
    assert time.thread_time() - began_s < 0.5


@pytest.mark.parametrize(
    "multiple",
    [1, 0, -7, 0.01, 1e-6, 3e-5, 100.0, 86_400, 86_400.0, 10**12, 1e300, MAX_MULTIPLE, True, "x"],
)
def test_usual_remainders_are_taken(multiple: Any) -> None:
    check_bounds({"multipleOf": multiple}, "field")


@pytest.mark.parametrize("multiple", [MAX_MULTIPLE + 1, 2e300, 1.000001, 2 * 10**12])
def test_remainders_of_many_states_are_refused(multiple: float) -> None:
    with pytest.raises(InvalidRequest, match="wanted at most 100000"):
        check_bounds({"multipleOf": multiple}, "field")


@pytest.mark.parametrize(
    "text",
    [
        "start: %json{schema}",
        "start: %json \n\t {schema}",
        "// %json {schema}\nstart: A",
        'start: "x"\n%ignore %json {schema}',
        "start: %lark {{\nstart: %lark {{\nstart: %json {schema}\n}}\n}}",
        "start: %json {{}} | %json {schema}",
        "start: %json {{ | %json {schema}",
    ],
)
def test_no_schema_is_hidden_in_a_lark_grammar(text: str) -> None:
    properties: dict[str, Any] = {f"p{i}": {} for i in range(MAX_OPTIONAL + 1)}
    many = {"properties": properties}
    with pytest.raises(InvalidRequest, match="1001 optional properties"):
        check_lark(text.format(schema=json.dumps(many)), "field")


@pytest.mark.parametrize("part", ['%json {"a": "', "%json [[[[[[[[", '%json "', "%json {"])
def test_texts_that_begin_many_schemas_take_no_time(part: str) -> None:
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match=f"more than {MAX_EMBEDDED} JSON schemas"):
        check_lark("start: " + part * (MAX_GRAMMAR_BYTES // len(part)), "field")
    few = "start: " + part * (MAX_EMBEDDED - 1)
    check_lark(few + "[" * (MAX_GRAMMAR_BYTES - len(few)), "field")
    assert time.thread_time() - began_s < 0.5
