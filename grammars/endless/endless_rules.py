"""Rules of Lark grammars of which no text has an end, because each text holds another one.

llguidance follows them: an answer goes on until it is cut off. Such a rule is a mistake wherever it
can be reached, as a list without an alternative for its last item. JSON schemas within a grammar
and terminals, which cannot refer to themselves, count as texts that end.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"(?P<nothing>\s+|//[^\n]*|\#[^\n]*)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^<>\s]*>)'
    r"|(?P<schema>%(?:json|regex|llguidance)\s*)(?=\{)"
    r"|(?P<name>(?:(?<=\n)[!?])?[A-Za-z_]\w*(?:-\w+)*)"
    r"|(?P<number>\d+)"
    r"|(?P<sign>%lark|%\w+|->|\.\.|.)"
)
_NO_RULE = "%"
"""Stands for the rule around what belongs to none, such as a list of imports."""

RuleName = tuple[int, str]
"""The number of a grammar, as grammars may stand within another one, and a name in it."""


@dataclass(slots=True)
class _Alternative:
    """The rules that one alternative of a rule names, and those of them that a text must hold."""

    named: list[RuleName] = field(default_factory=list)
    needed: list[RuleName] = field(default_factory=list)


def endless_rules(text: str) -> list[str]:
    """Return the names of the rules that can be reached and have no text with an end, in order.

    `text` is a grammar that llguidance has read. The work grows with its length and no faster.
    """
    rules = _Reader(text).rules
    ending = _ending(rules)
    reached = dict.fromkeys([(0, "start")])
    left = list(reached)
    while left:
        named = {other: None for one in rules.get(left.pop(), ()) for other in one.named}
        left += named.keys() - reached.keys()
        reached |= named
    endless = [name for name in rules if name in reached and name not in ending]
    return [name[1] for name in endless if _is_own(name)]


def _ending(rules: Mapping[RuleName, Sequence[_Alternative]]) -> set[RuleName]:
    """Return the rules that have a text with an end: those that need no other one come first."""
    num_needed: dict[tuple[RuleName, int], int] = {}
    needed_by: dict[RuleName, list[tuple[RuleName, int]]] = defaultdict(list)
    left = []
    for name, alternatives in rules.items():
        for number, one in enumerate(alternatives):
            needed = {other for other in one.needed if other in rules}
            num_needed[name, number] = len(needed)
            for other in needed:
                needed_by[other].append((name, number))
            if not needed:
                left.append(name)
    ending = set(left)
    while left:
        for alternative in needed_by.pop(left.pop(), ()):
            num_needed[alternative] -= 1
            name = alternative[0]
            if not num_needed[alternative] and name not in ending:
                ending.add(name)
                left.append(name)
    return ending


class _Reader:
    """Reads the rules of a grammar, and of grammars in it. A group is a rule without a name."""

    def __init__(self, text: str) -> None:
        self.rules: dict[RuleName, list[_Alternative]] = {}
        self._tokens = list(_tokens(text))
        self._closing = _closing_brackets(self._tokens)
        self._num_grammars = self._num_groups = 0
        self._grammars = [0]
        """The numbers of the grammars around this place, the innermost last."""
        self._open: list[list[RuleName]] = [[(0, _NO_RULE)]]
        """The rule of each of these grammars that is being read, and the groups around this place
        in it."""
        self._last: RuleName | None = None
        """The item before this place, if it is a rule that is needed."""
        place = 0
        while place < len(self._tokens):
            place = self._read(place)

    def _read(self, place: int) -> int:
        """Read an item, or a sign about the one before it; return the place behind it."""
        kind, value = self._tokens[place]
        behind = place + 1
        if kind == "name":
            head_end = self._end_of_head(place)
            if head_end is not None:
                self._begin_rule(value.lstrip("!?"))
                return head_end
            self._take_name(value)
        elif value in ("(", "["):
            self._begin_group(is_optional=value == "[")
        elif value in (")", "]"):
            self._end_group()
        elif value == "|":
            self._last = None
            self._alternatives().append(_Alternative())
        elif value in ("?", "*"):
            self._leave_out()
        elif value == "~" and self._kind_at(behind) == "number":
            self._repeat(least=self._tokens[behind][1])
        elif value == "{":
            behind = self._closing.get(place, place) + 1
            self._repeat(least=self._tokens[place + 1][1] if behind > place + 2 else "")
        elif value == "%lark":
            behind = self._begin_grammar(place)
        elif value == "}":
            self._end_grammar()
        elif value == "->":
            behind += 1  # a name that nothing here uses
        elif value.startswith("%"):
            self._begin_rule(_NO_RULE)
        elif value != "+":
            self._last = None
        return behind

    def _kind_at(self, place: int) -> str:
        return self._tokens[place][0] if place < len(self._tokens) else ""

    def _end_of_head(self, place: int) -> int | None:
        """Return the place behind the colon where a rule is defined; None where one is used."""
        place += 1
        if self._value_at(place) == "." and self._kind_at(place + 1) == "number":
            place += 2
        if self._value_at(place) == "[":
            place = self._closing.get(place, place) + 1
        return place + 1 if self._value_at(place) == ":" else None

    def _value_at(self, place: int) -> str:
        return self._tokens[place][1] if place < len(self._tokens) else ""

    def _alternatives(self) -> list[_Alternative]:
        return self.rules.setdefault(self._open[-1][-1], [])

    def _begin_rule(self, name: str) -> None:
        self._last = None
        self._open[-1] = [(self._grammars[-1], name)]
        self._alternatives().append(_Alternative())

    def _take_name(self, name: str) -> None:
        is_terminal = name.lstrip("_")[:1].isupper()
        self._last = None
        if not is_terminal:
            self._take((self._grammars[-1], name))

    def _take(self, name: RuleName, *, is_needed: bool = True) -> None:
        alternatives = self._alternatives()
        if not alternatives:  # what stands before the first rule
            alternatives.append(_Alternative())
        alternatives[-1].named.append(name)
        self._last = None
        if is_needed:
            alternatives[-1].needed.append(name)
            self._last = name

    def _leave_out(self) -> None:
        """Note that the item before this place may be left out."""
        if self._last is not None:
            self._alternatives()[-1].needed.pop()
            self._last = None

    def _repeat(self, least: str) -> None:
        if not least.isdecimal() or not least.strip("0"):
            self._leave_out()
        self._last = None

    def _begin_group(self, *, is_optional: bool) -> None:
        self._num_groups += 1
        name = self._grammars[-1], str(self._num_groups)
        self._take(name, is_needed=not is_optional)
        self._open[-1].append(name)
        self.rules[name] = [_Alternative()]
        self._last = None

    def _end_group(self) -> None:
        if len(self._open[-1]) > 1:
            name = self._open[-1].pop()
            needed = self._alternatives()[-1].needed
            self._last = name if needed and needed[-1] == name else None

    def _begin_grammar(self, place: int) -> int:
        self._num_grammars += 1
        self._take((self._num_grammars, "start"))
        self._grammars.append(self._num_grammars)
        self._open.append([(self._num_grammars, _NO_RULE)])
        self._last = None
        return place + 2  # behind its brace

    def _end_grammar(self) -> None:
        if len(self._grammars) > 1:
            self._grammars.pop()
            self._open.pop()
        self._last = None


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    decoder, place = json.JSONDecoder(), 0
    while (found := _TOKEN.match(text, place)) is not None:
        place, kind = found.end(), found.lastgroup or ""
        if kind == "schema":
            with suppress(ValueError, RecursionError):
                place = decoder.raw_decode(text, place)[1]
            yield "text", ""
        elif kind != "nothing":
            yield kind, found.group()


def _closing_brackets(tokens: Sequence[tuple[str, str]]) -> dict[int, int]:
    """Return the place of the sign that closes each bracket and brace, by the place of this."""
    found, left = {}, []
    for place, (_, value) in enumerate(tokens):
        if value in ("[", "{"):
            left.append(place)
        elif value in ("]", "}") and left:
            found[left.pop()] = place
    return found


def _is_own(name: RuleName) -> bool:
    """Return whether a grammar has a rule by this name, and not a group."""
    return not name[1].isdecimal() and name[1] != _NO_RULE
