"""What travels to the process that tries grammars, and back.

A message is its length and JSON. Nothing is unpickled: grammars are what strangers send.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InternalError, InvalidRequest, Overloaded
from common.grammar import Grammar, GrammarKind
from grammars.gbnf import Gbnf
from grammars.parts import NO_PARTS, GrammarParts, SchemaPart

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Trial:
    """A grammar that is compiled, with what it was written from, or one that is translated."""

    grammar: Grammar | Gbnf
    parts: GrammarParts = NO_PARTS


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial found: how many bytes the compiled grammar takes, and what is followed instead.

    That is the translation of GBNF, or a grammar of which parts were left out; None: the grammar.
    """

    num_bytes: int = 0
    instead: Grammar | None = None


def packed(message: Mapping[str, Any]) -> bytes:
    """Return what is written for a message."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def unpacked(received: bytearray) -> Iterator[dict[str, Any]]:
    """Take whole messages off the front of what was `received`."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        text = bytes(received[_LENGTH.size : end])
        del received[:end]
        yield json.loads(text)


def trial_fields(trial: Trial) -> dict[str, Any]:
    """Return a trial as JSON."""
    if isinstance(trial.grammar, Gbnf):
        return {"gbnf": [trial.grammar.text, trial.grammar.source]}
    return {"grammar": grammar_fields(trial.grammar), "parts": parts_fields(trial.parts)}


def trial_of(fields: Mapping[str, Any]) -> Trial:
    """Return what `trial_fields` described."""
    if "gbnf" in fields:
        return Trial(Gbnf(*fields["gbnf"]))
    return Trial(grammar_of_fields(fields["grammar"]), parts_of(fields["parts"]))


def parts_fields(parts: GrammarParts) -> dict[str, Any]:
    """Return what a grammar was written from as JSON."""
    return {
        "asked": None if parts.asked is None else grammar_fields(parts.asked),
        "schemas": [
            {
                "schema": dict(one.schema),
                "source": one.source,
                "is_lenient": one.is_lenient,
                "terminal": one.terminal,
                "weaker": one.weaker,
                "may_be_empty": one.may_be_empty,
            }
            for one in parts.schemas
        ],
    }


def parts_of(fields: Mapping[str, Any]) -> GrammarParts:
    """Return what `parts_fields` described."""
    asked = fields["asked"]
    return GrammarParts(
        None if asked is None else grammar_of_fields(asked),
        tuple(SchemaPart(**one) for one in fields["schemas"]),
    )


def grammar_fields(grammar: Grammar) -> list[str]:
    """Return a grammar as JSON."""
    return [grammar.kind.value, grammar.text, grammar.source]


def grammar_of_fields(fields: list[str]) -> Grammar:
    """Return what `grammar_fields` described."""
    kind, text, source = fields
    return Grammar(GrammarKind(kind), text, source)


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON."""
    return {
        "num_bytes": verdict.num_bytes,
        "instead": None if verdict.instead is None else grammar_fields(verdict.instead),
    }


def error_fields(error: Exception) -> dict[str, Any]:
    """Return an error as JSON."""
    param = error.param if isinstance(error, InvalidRequest) else None
    kind = "InvalidRequest" if isinstance(error, InvalidRequest) else type(error).__name__
    return {"error": kind, "message": str(error), "param": param}


def verdict_of(fields: Mapping[str, Any]) -> Verdict:
    """Return a verdict, or raise the error that was found instead.

    That is `InvalidRequest`, `Overloaded` or `InternalError`.
    """
    if "error" not in fields:
        instead = fields["instead"]
        found = None if instead is None else grammar_of_fields(instead)
        return Verdict(fields["num_bytes"], found)
    kind, message = fields["error"], fields["message"]
    if kind == "InvalidRequest":
        raise InvalidRequest(message, param=fields["param"])
    if kind == "Overloaded":
        raise Overloaded(message)
    raise InternalError(message)
