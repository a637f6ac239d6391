"""Lark, GBNF and regular expressions that are joined from fragments."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.support.grammars.hostile_grammars import BOUNDED, CRASHING, HOSTILE, LONG, SIBLINGS

_ATOMS = (
    *(
        "a",
        "b",
        ".",
        "[a-z]",
        "[^a]",
        "[]",
        "[z-a]",
        "[a-",
        "\\d",
        "\\w",
        "\\s",
        "\\S",
        "\\b",
        "^",
        "$",
    ),
    *(
        "\\x41",
        "\\u0041",
        "\\u{1F600}",
        "\\p{L}",
        "\\p{Greek}",
        "\\pX",
        "[[:alpha:]]",
        "[\\w&&[^a]]",
    ),
    *(
        "(?=a)",
        "(?!a)",
        "(?<=a)",
        "(?P<n>a)",
        "(?P=n)",
        "\\1",
        "(?i)",
        "(?i:a)",
        "(?:)",
        "(?s).",
        "()",
    ),
    *(
        "é",
        "中",
        "\U0001f600",
        "\x00",
        "\n",
        "\\",
        "\\n",
        "\\/",
        "/",
        "-",
        "]",
        "{",
        "}",
        "{1",
        "|",
    ),
)
_COUNTS = (
    "*",
    "+",
    "?",
    "*?",
    "{2}",
    "{0,3}",
    "{1,}",
    "{99}",
    "{0,1000}",
    "{3,1}",
    "{999999999}",
    "{,}",
)


def any_regex(rng: random.Random, depth: int = 3) -> str:
    """Return a regular expression, or nearly one."""
    parts = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        inner = rng.choice(_ATOMS)
        if depth and rng.random() < 0.3:
            inner = "(" + any_regex(rng, depth - 1) + ("" if rng.random() < 0.02 else ")")
        parts.append(inner + (rng.choice(_COUNTS) if rng.random() < 0.35 else ""))
    return rng.choice(("", "", "|")).join(parts)


def any_lark(rng: random.Random, schema: Any) -> str:
    """Return a grammar in Lark as llguidance has it; `schema` stands behind its `%json`."""
    names = ["start", "a", "b", "c"][: rng.randrange(1, 5)]
    lines = [f"{name}: {_lark_choice(rng, names, schema)}" for name in names]
    lines += rng.sample(
        [
            "T: /" + any_regex(rng).replace("/", "\\/") + "/",
            'U: "x".."z" | T?',
            "%ignore /[ \\t]+/",
            "%import common.INT",
            "%import common.NOTHING",
            "%llguidance {}",
            '%llguidance {"no_forcing": true}',
            "%declare T",
            "%override a: b",
            "%regex {",
            "// a remark",
            'e[capture, stop="x"]: /.*/',
            'f[max_tokens=3, temperature=0.5]: "y"',
            "_g.2: T~2..5",
            "start: start",
        ],
        rng.choice((0, 1, 2, 3)),
    )
    if rng.random() < 0.2:
        rng.shuffle(lines)
    return _torn(rng, "\n".join(lines))


def _lark_choice(rng: random.Random, names: list[str], schema: Any) -> str:
    atoms = (
        *('"a"', '"b"i', '""', "/[a-z]+/", "/a/i", "T", "U", "<eos>", "<bos>", "<[2]>", "<[1-9]>"),
        *(
            "(" + rng.choice(names) + ")",
            "[" + rng.choice(names) + "]",
            rng.choice(names),
            "nothing",
        ),
        *("%json " + json.dumps(schema, default=str), "%json {", '%lark { start: "x" }', "%lark {"),
        *('%regex { "substring_chunks": ["a", "b"] }', '%json {"$ref": "#"}', "@grammar", "<|x|>"),
    )
    parts = [
        rng.choice(atoms)
        + rng.choice(("", "", "", "*", "+", "?", "~3", "{2,4}", "~0..99999", " ->x"))
        for _ in range(rng.choice((1, 1, 2, 3, 6)))
    ]
    return "".join(part + rng.choice((" ", " ", " | ")) for part in parts).rstrip(" |") or '"a"'


def any_gbnf(rng: random.Random) -> str:
    """Return a grammar in GBNF."""
    names = ["root", "a", "b-c", "d"][: rng.randrange(1, 5)]
    lines = []
    for name in names:
        atoms = (
            *('"a"', '"\\n"', '"\\x41"', "[a-z]", "[^\\n]", "[a-", '""', "(", ")", ".", "nothing"),
            *(
                rng.choice(names),
                f"({rng.choice(names)} | {rng.choice(names)})",
                "[\\u4e00-\\u9fff]",
            ),
        )
        parts = [
            rng.choice(atoms) + rng.choice(("", "", "*", "+", "?", "{3}", "{1,9}", "{0,99999}"))
            for _ in range(rng.choice((1, 2, 3, 5)))
        ]
        lines.append(f"{name} ::= " + rng.choice((" ", " | ", "\n  | ")).join(parts))
    if rng.random() < 0.1:
        lines.append("# a remark")
    return _torn(rng, "\n".join(lines))


def known_hostile(rng: random.Random) -> tuple[str, str]:
    """Return one of the grammars that once took unbounded time or memory: its kind and text."""
    known = {**HOSTILE, **CRASHING, **LONG, **BOUNDED, **SIBLINGS}
    grammar = known[rng.choice(sorted(known))]
    return grammar.kind.name, grammar.text


def _torn(rng: random.Random, text: str) -> str:
    """At times without a part, with one twice, or many times over."""
    where = rng.random()
    at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    if where < 0.06:
        return text[:at] + text[to:]
    if where < 0.1:
        return text[:to] + text[at:]
    if where < 0.12:
        return (text + "\n") * rng.choice((2, 30, 300))
    return text
