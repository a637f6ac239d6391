"""From the fields that constrain an answer to its grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_…` fields, and
SGLang's `json_schema`, `regex` and `ebnf` say the same things in different words. A schema is
enforced with `strict` or without. A request has one of them at most: two would have to hold both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.gbnf import Gbnf, lark_or_gbnf
from grammars.texts import choice_grammar
from router.api.bodies.json_text import with_whole_characters

_ANY_OBJECT = '{"type":"object"}'

Body = Mapping[str, Any]


class Constrained(Protocol):
    """The fields of a body that constrain its answer, as the client wrote them."""

    response_format: Any
    structured_outputs: Any
    guided_json: Any
    guided_json_object: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any
    json_schema: Any
    regex: Any
    ebnf: Any


def grammar_of(body: Constrained) -> Grammar | Gbnf | None:
    """Return the grammar that a body asks for, not compiled yet; None where its answer is free.

    Raises `InvalidRequest` naming the field for a form that is not known, and for two grammars.
    """
    found = [
        grammar
        for name, read in _FIELDS.items()
        if (value := getattr(body, name)) is not None and (grammar := read(value, name)) is not None
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[1].source} and {found[0].source} both constrain the answer: wanted one of "
            "them",
            param=found[1].source,
        )
    return found[0] if found else None


def _response_format(value: Any, name: str) -> Grammar | None:
    if value in ({}, []):  # an object without fields, which PHP writes as an empty list
        return None
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object with a type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise InvalidRequest(
            f"{name}.type is {_shown(kind)}: wanted text, json_object or json_schema",
            param=f"{name}.type",
        )
    # llama.cpp and others have the schema beside either type, without a name.
    schema, place = value.get("schema") or None, f"{name}.schema"
    described = value.get("json_schema")
    if schema is not None and described:
        raise InvalidRequest(
            f"{place} and {name}.json_schema are both given: wanted one schema", param=place
        )
    if schema is None and (described or kind == "json_schema"):
        if not isinstance(described, dict):
            raise _wrong(f"{name}.json_schema", described, "an object with a schema")
        schema, place = described.get("schema"), f"{name}.json_schema.schema"
        if schema is None:
            raise InvalidRequest(f"{place} is missing", param=place)
    if schema is None:
        return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, name)
    return _json(schema, place)


def _structured_outputs(value: Any, name: str) -> Grammar | Gbnf | None:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    asked = {key: one for key, one in value.items() if one is not None and one is not False}
    unknown = sorted(set(asked) - _STRUCTURED.keys() - _STYLE)
    if unknown:
        field = f"{name}.{unknown[0][:64]}"
        raise InvalidRequest(f"{field} is not supported by this server", param=field)
    chosen = [key for key in _STRUCTURED if key in asked]
    if len(chosen) != 1:
        raise InvalidRequest(
            f"{name} has {' and '.join(chosen) or 'nothing'}: wanted one of "
            f"{', '.join(_STRUCTURED)}",
            param=name,
        )
    return _STRUCTURED[chosen[0]](asked[chosen[0]], f"{name}.{chosen[0]}")


def _json(value: Any, name: str) -> Grammar:
    if isinstance(value, str):
        # Escapes in the text may spell what is no text, and no answer could have it.
        text = with_whole_characters(value.encode()).decode()
        return Grammar(GrammarKind.JSON_SCHEMA, text, name)
    if value == []:
        value = {}
    if not isinstance(value, dict | bool):
        raise _wrong(name, value, "a JSON schema, as an object or as text")
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Grammar(GrammarKind.JSON_SCHEMA, text, name)


def _json_object(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, name) if value else None


def _regex(value: Any, name: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, _text(value, name), name)


def _choice(value: Any, name: str) -> Grammar:
    if not isinstance(value, list):
        raise _wrong(name, value, "a list of texts")
    for index, one in enumerate(value):
        if not isinstance(one, str):
            raise _wrong(f"{name}.{index}", one, "a text, as an answer is one")
    return choice_grammar(value, name)


def _lark(value: Any, name: str) -> Grammar | Gbnf:
    return lark_or_gbnf(_text(value, name), name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {_shown(value)}: wanted {wanted}", param=name)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:64])
    return "missing" if value is None else f"of type {type(value).__name__}"


_Read = Callable[[Any, str], Grammar | Gbnf | None]

_FIELDS: Mapping[str, _Read] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_json_object": _json_object,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
    "json_schema": _json,
    "regex": _regex,
    "ebnf": _lark,
}
_STRUCTURED: Mapping[str, _Read] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}
_STYLE = frozenset(("disable_fallback", "disable_any_whitespace", "whitespace_pattern", "backend"))
"""Wishes about white space and back ends, which differ between servers; they do nothing here."""
