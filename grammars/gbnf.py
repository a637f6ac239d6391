"""GBNF, the form of grammars that llama.cpp has (`root ::= …`), and its translation to Lark.

The translation is llguidance's. Its work grows with the square of the number of rules, and it holds
the interpreter's lock: it belongs in a process whose pauses stop no stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llguidance.gbnf_to_lark import gbnf_to_lark

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind

MAX_GBNF_CHARS = 32 << 10
MAX_GBNF_RULES = 512
MAX_GBNF_WORK = 2 << 20
"""Most characters times rules: a translation looks at each rule again for each other one. This many
take 0.3 s on a core of a Xeon."""

_NEITHER = "it has neither `root ::=`, as in GBNF, nor a line that begins with `start:`, as in Lark"
_EMPTY_HEADER = "%llguidance {}"
# Within a line: across lines, each blank line would be read once for each one before it.
_BEGIN_OF_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gbnf:
    """A grammar as GBNF, not parsed yet; `source` is the field of the body that asked for it.

    Raises `InvalidRequest` for more than `MAX_GBNF_CHARS`, `MAX_GBNF_RULES` or `MAX_GBNF_WORK`.
    """

    text: str
    source: str

    def __post_init__(self) -> None:
        # Counted before any parsing, so signs within literals count too.
        num_chars, num_rules = len(self.text), self.text.count("::=")
        for what, count, most in (
            ("characters", num_chars, MAX_GBNF_CHARS),
            ("rules", num_rules, MAX_GBNF_RULES),
            ("characters times rules", num_chars * num_rules, MAX_GBNF_WORK),
        ):
            if count > most:
                raise InvalidRequest(
                    f"{self.source} has {count} {what}: wanted at most {most} in GBNF",
                    param=self.source,
                )


def lark_or_gbnf(text: str, source: str) -> Grammar | Gbnf:
    """Return the grammar of a text in one of the two forms, in time linear in its length.

    Raises `InvalidRequest` for a text that is too long for its form.
    """
    if _BEGIN_OF_LARK.search(text) is None:
        return Gbnf(text, source)
    return Grammar(GrammarKind.LARK, text.removeprefix(_EMPTY_HEADER).lstrip(), source)


def lark_of_gbnf(gbnf: Gbnf) -> Grammar:
    """Translate a grammar. Raises `InvalidRequest` for a text that is none."""
    try:
        text = gbnf_to_lark(gbnf.text).removeprefix(_EMPTY_HEADER).lstrip()
    except Exception as error:  # the parser raises what its input makes of it
        why = str(error)[:400] if "::=" in gbnf.text else _NEITHER
        raise InvalidRequest(f"{gbnf.source} is no grammar: {why}", param=gbnf.source) from None
    return Grammar(GrammarKind.LARK, text, gbnf.source)
