"""Every kind of grammar as Lark text for llguidance.

JSON has one form, the most usual one: on one line, with a space after each comma and each colon of
an object. So no answer is filled with blanks, and the text between two values is known beforehand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from grammars.bounds import check_bounds
from grammars.dates import add_calendar
from grammars.endless.endless_parts import end_endless
from grammars.look_around import without_look_around
from grammars.nothing_asked import drop_nothings
from grammars.numbers.exact_numbers import with_whole_bounds
from grammars.numbers.number_ranges import with_every_decimal, without_excluded_bound
from grammars.one_of import OneOf
from grammars.schema_walk import copied_parts
from grammars.weaker_schemas import leave_out_beyond

_WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_SPACES = r" \t\n\r\f\v"
# Comments and literals without an end count as well: so no character is read twice.
_LITERALS = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\\n]|\\.)+/?')


def json_rule(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """Return the right side of a Lark rule that describes a JSON value of `schema`.

    With `is_lenient` what cannot be enforced is left out, as far as that is known before the schema
    is compiled.
    """
    options = {**_WHITE_SPACE, "lenient": True} if is_lenient else _WHITE_SPACE
    whole = dict(schema)
    parts, one_of = [], OneOf(schema)
    for part in copied_parts(whole):
        drop_nothings(part)
        without_look_around(part)
        one_of.with_any_of(part)
        with_whole_bounds(part)
        without_excluded_bound(part)
        if is_lenient:
            leave_out_beyond(part)
        add_calendar(part)
        parts.append(part)
    one_of.rename(whole, parts)
    end_endless(whole, parts, is_lenient=is_lenient)
    for part in parts:
        with_every_decimal(part)
    # Not escaped: `compiled_text` looks for the texts of tokens in it.
    described = json.dumps({**whole, "x-guidance": options}, ensure_ascii=False)
    return f"%json {described}"


def ascii_regex(pattern: str) -> str:
    """Return a regular expression between slashes; `\\d`, `\\s` and `\\w` are ASCII, as elsewhere.

    They are so in other servers' expressions, and what reads an answer takes no other digits.
    """
    # A space is escaped: as it is, the flag x would leave it out.
    return llguidance.regex_to_lark(pattern, use_ascii="dws").replace(
        _SPACES, rf"\x20{_SPACES[1:]}"
    )


def choice_grammar(choices: Sequence[str], source: str) -> Grammar:
    """Return the grammar of one of several texts; `InvalidRequest` for none or an empty one."""
    if not choices or not all(choices):
        wrong = "an empty text" if choices else "no texts"
        raise InvalidRequest(f"{source} has {wrong}: wanted texts", param=source)
    # DEL is escaped by no JSON writer, and no Lark literal may hold it.
    texts = [json.dumps(one, ensure_ascii=False).replace("\x7f", "\\u007f") for one in choices]
    return Grammar(GrammarKind.LARK, f"start: {' | '.join(texts)}", source)


def as_lark(grammar: Grammar, rule: str) -> str:
    """Return Lark text that defines `rule` as the whole grammar.

    Raises `InvalidRequest` for a JSON schema that `schema_of` refuses.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return f"{rule}: {json_rule(schema_of(grammar))}"
    if grammar.kind is GrammarKind.REGEX:
        return f"{rule}: /{ascii_regex(grammar.text)}/"
    return grammar.text if rule == "start" else f"{rule}: %lark {{\n{grammar.text}\n}}"


def schema_of(grammar: Grammar) -> dict[str, Any]:
    """Return the schema of a grammar of that kind.

    Raises `InvalidRequest` where it is no JSON, neither an object nor true, or too large.
    """
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"the JSON schema is not valid JSON: {error}", param=grammar.source or None
        ) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"the JSON schema is a {type(schema).__name__}: wanted an object or true",
            param=grammar.source or None,
        )
    check_bounds(schema, grammar.source)
    return schema


def compiled_text(lark: str, added_texts: Sequence[str]) -> str:
    """Return what is compiled for a Lark grammar. `added_texts`: of the tokenizer's added tokens.

    llguidance forces text that must follow in the pieces that the tokenizer makes of it. Where a
    literal holds the text of an added token, that piece is the token itself, which is no text: no
    token could follow. Such a grammar is compiled without forcing.
    """
    # A rule may name added tokens; only the texts that it quotes are text.
    quoted = "\n".join(_LITERALS.findall(lark)).replace("\\", "")
    return _NO_FORCING + lark if any(one in quoted for one in added_texts) else lark
