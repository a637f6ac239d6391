"""Grammars compile within limits; what cannot be followed is refused with its place."""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.structured.schemas import SCHEMAS
from common.errors import CheckpointError, InvalidRequest
from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from grammars.bounds import MAX_DEPTH, MAX_OPTIONAL
from grammars.compiler import GrammarCompiler, is_beyond_limits
from grammars.parts import GrammarParts, SchemaPart
from tests.support.engine import hash_grammars
from tests.support.grammars.hostile_grammars import HOSTILE
from tests.support.http.edge_model import write_model_folder
from tests.unit.grammars.matching import follows


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """Compiler for a tokenizer with every byte, a few words, and two special tokens."""
    folder = write_model_folder(tmp_path_factory.mktemp("tiny"))
    found = GrammarCompiler.load(folder, 320, {1})
    assert found is not None
    return found


def schema(value: Any) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value)
    return Grammar(GrammarKind.JSON_SCHEMA, text, "guided_json")


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_every_kind_compile(name: str, compiler: GrammarCompiler) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    compiler.matcher(schema(SCHEMAS[name]))


@pytest.mark.covers("G10")
def test_json_has_one_form(compiler: GrammarCompiler) -> None:
    grammar = schema({"type": "object"})
    assert follows(compiler, grammar, '{"a": [1, 2], "b": {"c": null}}')
    for text in ('{"a":1}', '{ "a": 1}', '{"a": [1,2]}', '{"a":  1}', '{"a": 1\n}', "[1]", "{"):
        assert not follows(compiler, grammar, text)


@pytest.mark.covers("G11")
@pytest.mark.parametrize(
    ("wrong", "place", "why"),
    [
        ({"not": {}}, "#", "not"),
        (
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            "#/properties/a/items",
            "uniqueI",
        ),
        ({"anyOf": [{}, {"if": {}, "then": {"type": "null"}}]}, "#/anyOf/1", "if"),
        (
            {"$defs": {"x": {"contains": {"type": "null"}}}, "$ref": "#/$defs/x"},
            "#/$defs/x",
            "contains",
        ),
        ({"properties": {"a~/b": {"type": "word"}}}, "#/properties/a~0~1b", "Invalid type"),
        ({"items": {"$ref": "https://example.org/a"}}, "#/items", "example.org"),
        ({"properties": {"a": {"pattern": "(?<=a)b"}}}, "#/properties/a", "look-around"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "#", "Unsatisfiable"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "#", "oneOf"),
        ({"$ref": "#"}, "#", "no text follows it"),
        (
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "$ref": "#/$defs/a",
            },
            "#/$defs/a",
            "no text follows it",
        ),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_place(
    wrong: dict[str, Any], place: str, why: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match=why) as raised:
        compiler.matcher(schema(wrong))
    assert raised.value.param == "guided_json"
    assert f"followed: {place}: " in str(raised.value)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def test_the_depth_of_a_schema_is_bounded(compiler: GrammarCompiler) -> None:
    compiler.matcher(schema(nested(MAX_DEPTH - 1)))
    for depth in (MAX_DEPTH, 1000, 10_000):
        with pytest.raises(InvalidRequest, match=r"levels|valid JSON"):
            compiler.matcher(schema(nested(depth)))


def with_properties(num_optional: int, num_required: int = 0) -> dict[str, Any]:
    names = [f"p{number}" for number in range(num_optional + num_required)]
    properties = {name: {"type": "integer"} for name in names}
    required = names[num_optional:]
    return {"type": "object", "properties": properties, "required": required}


def test_as_many_optional_properties_as_are_taken_can_be_followed(
    compiler: GrammarCompiler,
) -> None:
    grammar = schema({"anyOf": [{"type": "null"}, with_properties(MAX_OPTIONAL, 500)]})
    matcher = compiler.matcher(grammar)
    for token_id in compiler.tokenizer.tokenize_str('{"p3": 1, "p900": 2, "p1000": 3, "p1001": '):
        assert matcher.consume_token(token_id), matcher.get_error()
        assert any(matcher.compute_bitmask())
        assert not matcher.is_error(), matcher.get_error()


def test_more_optional_properties_are_refused_with_their_place(compiler: GrammarCompiler) -> None:
    wide = {"$defs": {"a/b": with_properties(MAX_OPTIONAL + 1)}, "$ref": "#/$defs/a~1b"}
    place = "1001 optional properties at #/[$]defs/a~1b: wanted at most 1000"
    with pytest.raises(InvalidRequest, match=place) as refused:
        compiler.matcher(schema(wide))
    assert refused.value.param == "guided_json"
    compiler.matcher(schema({**wide, "$defs": {"a/b": with_properties(MAX_OPTIONAL, 1)}}))


def test_objects_that_are_too_large_together_are_refused(compiler: GrammarCompiler) -> None:
    parts = [with_properties(MAX_OPTIONAL), with_properties(MAX_OPTIONAL)]
    parts[1]["properties"] = {f"q{name}": value for name, value in parts[1]["properties"].items()}
    with pytest.raises(InvalidRequest, match=r"cannot be followed: #: .*items; max is") as refused:
        compiler.matcher(schema({"allOf": parts}))
    assert is_beyond_limits(str(refused.value))
    assert not is_beyond_limits('token "fuel" doesn\'t satisfy the grammar')


def test_the_properties_of_a_tool_are_counted_too(compiler: GrammarCompiler) -> None:
    part = SchemaPart(schema=with_properties(2000), source="tools[0]", is_lenient=False)
    with pytest.raises(InvalidRequest, match=r"of tools\[0\] has 2000 optional prop") as refused:
        compiler.check(schema({"type": "null"}), GrammarParts(schemas=(part,)))
    assert refused.value.param == "tools[0]"
    asked = GrammarParts(asked=schema(with_properties(2000)))
    with pytest.raises(InvalidRequest, match="2000 optional properties at #:"):
        compiler.check(schema({"type": "null"}), asked)


@pytest.mark.covers("G13")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_take_bounded_time_and_memory(
    name: str, compiler: GrammarCompiler
) -> None:
    """They are refused, or followed for a while; no step of it takes long."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.thread_time()
    try:
        matcher = compiler.matcher(HOSTILE[name])
    except InvalidRequest as refused:
        told = str(refused)
    else:
        told = ""
        for _ in range(5):
            if matcher.is_stopped():
                break
            allowed = hash_grammars.allowed_ids(matcher, 320)
            if matcher.is_error() or not len(allowed):
                break
            matcher.consume_token(int(allowed[-1]))
    assert len(told) < 600
    assert time.thread_time() - began_s < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_the_text_of_a_special_token_is_text(compiler: GrammarCompiler) -> None:
    """Forced text that spells a token would be that token, which is no text."""
    for text in ("<|im_end|>x", "<|im_start|>"):
        for grammar in (
            schema({"const": text}),
            Grammar(GrammarKind.REGEX, re.escape(text)),
            Grammar(GrammarKind.LARK, f"start: {json.dumps(text)}"),
        ):
            matcher, drawn = compiler.matcher(grammar), b""
            while not matcher.is_accepting():
                allowed = hash_grammars.allowed_ids(matcher, 320)
                assert not {0, 1} & set(allowed.tolist()), "a special token is no text"
                token_id = int(allowed[0])
                assert matcher.consume_token(token_id)
                drawn += compiler.tokenizer.decode_bytes([token_id])
            assert drawn.decode().strip('"') == text


def test_texts_are_bounded() -> None:
    Grammar(GrammarKind.REGEX, "a" * MAX_GRAMMAR_BYTES)
    for text in ("", "a" * (MAX_GRAMMAR_BYTES + 1), "é" * (MAX_GRAMMAR_BYTES // 2 + 1)):
        with pytest.raises(InvalidRequest, match=f"wanted 1 to {MAX_GRAMMAR_BYTES}"):
            Grammar(GrammarKind.REGEX, text)
    with pytest.raises(InvalidRequest, match="surrogate"):
        Grammar(GrammarKind.REGEX, "\ud800")


def test_what_is_counted() -> None:
    one = GrammarCompiler(hash_grammars.compiler().tokenizer)
    good, bad = Grammar(GrammarKind.REGEX, "[0-9]"), Grammar(GrammarKind.LARK, "start: X")
    for _ in range(3):
        one.matcher(good)
    with pytest.raises(InvalidRequest):
        one.matcher(bad)
    assert one.lookups() == {"cached": 2, "compiled": 1, "refused": 1}
    counts = {kind: view.count for kind, view in one.compile_s().items()}
    assert counts == {"json_schema": 0, "regex": 1, "lark": 1}
    assert 1000 < one.cached_bytes == one.bytes_of(good) < 1 << 20


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    assert GrammarCompiler.load(tmp_path, 10, {1}) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert GrammarCompiler.load(tmp_path, 10, set()) is None
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        GrammarCompiler.load(tmp_path, 10, {1})
    # The library panics, which is no `Exception`: a prefix is longer than a token.
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    layout = {"added_tokens": [], "model": {**model, "continuing_subword_prefix": "####"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: .* is out of "):
        GrammarCompiler.load(tmp_path, 10, {1})
