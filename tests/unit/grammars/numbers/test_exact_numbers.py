"""Numbers in schemas are those that are written, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest
from grammars.compiler import GrammarCompiler
from tests.unit.grammars.matching import follows_schema

EXACT = (
    *(0, -1, 7, 2**53 - 1, 2**53, -(2**53), 2**53 + 2, 2**60, -(2**62), 1420070400123456768),
    *(2**63 - 1024, 2**63 - 1, 1024 - 2**63),
)
INEXACT = (
    *(2**53 + 1, -(2**53) - 1, 2**54 + 2, 1420070400123456789, 2**63 - 2, 2**63, 2**64 - 1),
    *(12345678901234567890, 10**40, -(10**40), 10**400, -(2**63), 1 - 2**63, 511 - 2**63),
    *(-(2**63) - 1, -(2**64), 1 - 2**62),
)


def ways(number: int) -> dict[str, tuple[Any, str]]:
    """Schemas of which one integer is the one value, and the place of a number in them."""
    return {
        "const": ({"const": number}, "#/const"),
        "const and type": ({"type": "integer", "const": number}, "#/const"),
        "enum": ({"enum": [number]}, "#/enum/0"),
        "bounds": ({"type": "integer", "minimum": number, "maximum": number}, "#/minimum"),
        "exclusive": (
            {"type": "integer", "exclusiveMinimum": number - 1, "exclusiveMaximum": number + 1},
            "#/exclusiveMinimum",
        ),
        "or null": (
            {"type": ["integer", "null"], "exclusiveMinimum": number - 1, "maximum": number},
            "#/maximum",
        ),
    }


@pytest.mark.covers("K01")
@pytest.mark.parametrize("number", EXACT)
def test_these_integers_are_enforced_as_they_are(number: int, compiler: GrammarCompiler) -> None:
    for way, (schema, _) in ways(number).items():
        assert follows_schema(compiler, schema, str(number)), way
        for other in (number - 1, number + 1, number * 10):
            assert not number or not follows_schema(compiler, schema, str(other)), (way, other)


@pytest.mark.covers("K01")
@pytest.mark.parametrize("number", INEXACT)
def test_those_are_refused_with_their_place(number: int, compiler: GrammarCompiler) -> None:
    for way, (schema, place) in ways(number).items():
        with pytest.raises(InvalidRequest, match="JSON schema has the number") as refused:
            follows_schema(compiler, schema, str(number))
        if "exclusive" not in way and way != "or null":
            wanted = "one from -9223372036854775295 to 9223372036854775807"
            if -(2**63) + 513 <= number < 2**63:
                wanted = "at most 9007199254740992, up or down, or one that a 64-bit float holds"
            assert str(refused.value).endswith(f" at {place}: wanted {wanted}")
        assert refused.value.param == "guided_json"
        assert len(str(refused.value)) < 300


@pytest.mark.covers("K01")
@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"a": [1, 2**53 + 1]}},
        {"enum": ["a", {"id": 2**64}]},
        {"properties": {"a": {"items": {"minimum": 2**53 + 1}}}},
        {"type": "integer", "const": 1e40},
        {"type": "integer", "maximum": 1e19},
        {"type": ["integer", "string"], "enum": [1e300]},
        {"type": ["integer", "number"], "exclusiveMinimum": 2**53},
        {"type": "integer", "exclusiveMinimum": int("9" * 4300)},
        {"type": "integer", "exclusiveMaximum": -1e300},
        {"minimum": -1e30, "maximum": -1e30},
        {"const": float("inf")},
        {"minimum": float("nan")},
    ],
)
def test_wherever_they_are(schema: Any, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="has the number"):
        follows_schema(compiler, schema, "1")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "number", "minimum": 2**53, "maximum": 2**53 + 2}, "9007199254740993", "1"),
        ({"type": "integer", "exclusiveMaximum": 2**63, "minimum": 0}, str(2**63 - 1), str(2**63)),
        ({"type": "integer", "exclusiveMinimum": 1.5, "maximum": 2.5}, "2", "3"),
        ({"const": 1e22}, "1" + "0" * 22, "1"),
        (
            {"default": {"minimum": 2**53 + 1}, "examples": [{"const": 10**40}], "const": 1},
            "1",
            "2",
        ),
        ({"properties": {"const": {"minimum": 3}, "enum": {}}}, '{"const": 3}', '{"const": 2}'),
        ({"type": "string", "enum": ["9007199254740993"]}, '"9007199254740993"', '"1"'),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"a"', '""'),
    ],
)
def test_other_numbers_mean_what_they_meant(
    schema: Any, right: str, wrong: str, compiler: GrammarCompiler
) -> None:
    assert follows_schema(compiler, schema, right)
    assert not follows_schema(compiler, schema, wrong)


@pytest.mark.parametrize("kind", ["integer", "number", ["number", "null"]])
@pytest.mark.parametrize(
    ("keyword", "number", "missing"),
    [
        ("minimum", 10**18, "maximum"),
        ("minimum", 1e18, "maximum"),
        ("maximum", -(10**18), "minimum"),
    ],
)
def test_a_large_bound_needs_one_on_the_other_side(
    kind: Any, keyword: str, number: float, missing: str, compiler: GrammarCompiler
) -> None:
    schema = {"type": kind, keyword: number}
    # What is wanted is taken.
    taken = "9" * 18 if number > 0 else "-" + "9" * 18
    assert follows_schema(compiler, {"type": kind, keyword: number // 10}, taken)
    assert follows_schema(compiler, {**schema, missing: 2 * number}, str(int(number)))
    with pytest.raises(InvalidRequest) as refused:
        follows_schema(compiler, schema, taken)
    wanted = f"wanted less than 1000000000000000000, up or down, or a `{missing}` too"
    assert str(refused.value).endswith(f" at #/{keyword}: {wanted}")


@pytest.mark.parametrize("number", [1e21, -1e21, 1e300])
def test_a_number_beyond_64_bits_is_told_the_bounds(
    number: float, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        follows_schema(compiler, {"type": "number", "minimum": number}, "1")
    wanted = "wanted one from -9223372036854775295 to 9223372036854775807"
    assert str(refused.value) == f"the JSON schema has the number {number} at #/minimum: {wanted}"
