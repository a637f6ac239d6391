"""Grammars of answers in harmony, in llguidance's Lark.

The headers of an answer follow the format, and its tags are tokens. What is thought, and text for
the user, is free; a request's own constraint is on the text of `final` alone. Calls stand on the
channel `commentary`, or on `analysis` as models write them too, with the recipient before the
channel or behind it. An answer ends with its calls, or with the text of `final`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from grammars.texts import json_rule
from router.tools.definitions import Tool, ToolUse
from router.tools.grammars import arguments_schema
from router.tools.harmony.message_cut import Place
from router.tools.harmony.tags import (
    ANALYSIS,
    CHANNEL_TAG,
    COMMENTARY,
    CONSTRAIN_TAG,
    END_TAG,
    FINAL,
    HARMONY,
    MESSAGE_TAG,
    NAMESPACE,
    ROLE,
    START_TAG,
)

_ROLE = f'{START_TAG} "{ROLE}"'
_FREE = "TEXT?"
_RULES = [
    r"TEXT: /(.|\n)+/",
    f"next: {END_TAG} {_ROLE}",
    f"thought: {CHANNEL_TAG} analysis {MESSAGE_TAG} {_FREE} next",
    f'remark: {CHANNEL_TAG} "{COMMENTARY}" {MESSAGE_TAG} {_FREE} next',
]
_TYPED_TEXT = f'(" "? {CONSTRAIN_TAG} /[A-Za-z]{{1,16}}/)?'
"""The type of a text, which models write where they are asked for JSON."""
_CALL_RULES = [
    f'called_on: {CHANNEL_TAG} ("{COMMENTARY}" | analysis)',
    f'typed: (" json" | " code" | " "? {CONSTRAIN_TAG} "json")? {MESSAGE_TAG}',
]


def answers(
    place: Place,
    use: ToolUse | None,
    text_rule: str = "",
    *,
    spelt: Callable[[str], Sequence[int]] | None = None,
) -> str:
    """Return the grammar of the answers that begin at `place`.

    With a `text_rule`, which defines the rule `asked`, the text on `final` is of that rule. With
    `spelt`, which returns the tokens of a text, the model thinks in one message at most, and at
    once, and its header has these tokens: a budget begins behind them, and the same words could be
    spelled with others.
    """
    text = "asked" if text_rule else _FREE
    start = _start(place, use, text)
    analysis, role = f'"{ANALYSIS}"', f'"{ROLE}"'
    if spelt:
        analysis = _tokens_of(ANALYSIS, CHANNEL_TAG, spelt)
        role = _tokens_of(ROLE, START_TAG, spelt)
    typed = _TYPED_TEXT if text_rule else ""
    final = f'final: {CHANNEL_TAG} "{FINAL}" {typed} {MESSAGE_TAG} {text}'
    rules = [f"start: {start}", f"role: {role}", f"analysis: {analysis}", *_RULES, final]
    if text_rule:
        rules.append(text_rule)
    must_call = use is not None and use.must_call
    ends = [] if must_call else ["final"]
    if use is not None:
        ends.append("calls")
        rules += [*_CALL_RULES, *_rules_of_calls(use)]
    rules.append(f"end: {' | '.join(ends)}")
    remarks = "" if must_call or text_rule else "remark*"
    if spelt:
        rules += ["answer: thought? later", f"later: {remarks} end"]
    else:
        rules += [
            f"answer: {'(thought | remark)*' if remarks else 'thought*'} end",
            "later: answer",
        ]
    return "\n".join(rules) + "\n"


def _tokens_of(word: str, tag: str, spelt: Callable[[str], Sequence[int]]) -> str:
    """Return the tokens of a word behind a tag."""
    _, *token_ids, _ = spelt(f"{tag}{word}{MESSAGE_TAG}")
    return " ".join(f"<[{token_id}]>" for token_id in token_ids)


def _start(place: Place, use: ToolUse | None, text: str) -> str:
    match place:
        case Place.BETWEEN:
            return f"{START_TAG} role answer"
        case Place.THOUGHT:
            return f"{_FREE} next later"
        case Place.TEXT:
            if use is None:
                return text
            return "next calls" if use.must_call else f"{text} | {text} next calls"
        case _:
            return "answer"


def _rules_of_calls(use: ToolUse) -> list[str]:
    tools = use.callable_tools
    most = HARMONY.most_calls if use.is_parallel else 1
    more = f" (next call){{0,{most - 1}}}" if most > 1 else ""
    return [
        f"calls: call{more}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
        *_call_rules(tools),
    ]


def _call_rules(tools: Sequence[Tool]) -> list[str]:
    rules = []
    for number, tool in enumerate(tools):
        to = json.dumps(f" to={NAMESPACE}{tool.name}")
        arguments = json_rule(arguments_schema(tool), is_lenient=not tool.is_strict)
        rules.append(f"call_{number}: (called_on {to} | {to} called_on) typed {arguments}")
    return rules
