"""The grammar of a tool's arguments between tags, in llguidance's Lark.

Arguments come in the order of the schema, and any others behind them. The value of a text is a
lexeme that ends with the tag behind it, or before it where that is a token. Where an argument may
be a text or another value, one that is a scalar of another kind is that scalar, and a text does not
begin as a list or an object that may stand there: so what is written is read as one value alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import InvalidRequest
from common.grammar import MAX_GRAMMAR_BYTES
from grammars.parts import SchemaPart
from grammars.schema_walk import Targets
from grammars.texts import json_rule
from router.tools.definitions import Tool
from router.tools.tagged.kinds import DescribedArguments, described_arguments, taken_by
from router.tools.tagged.patterns import literal, may_be_empty, pattern_of, text_expressions
from router.tools.tagged.references import standing_alone
from router.tools.tagged.tags import Tags

_SAID = frozenset({"title", "description", "default", "example", "examples", "deprecated"})
"""Keywords that ask for nothing; without them schemas of several arguments are the same."""
_KEY = r'[^<>"\n]{1,64}'
"""The pattern of the name of an argument that the schema does not name."""
_MOST_OTHERS = 32


class TaggedRules:
    """Writes the rules of the arguments of one request's tools, each value's once."""

    def __init__(
        self, tags: Tags, tokens: Mapping[str, str], expression: Callable[[str], str]
    ) -> None:
        """Write with `expression`, which has the Lark of texts; `tokens` are the tags in Lark that
        are tokens."""
        self._tags = tags
        self._tokens = tokens
        self._expression = expression
        self._values: dict[tuple[str, bool, int], str] = {}
        self._num_chars = 0
        self._last: tuple[Mapping[str, Any], Targets] | None = None
        self.lines: list[str] = []
        """The rules that expressions name."""
        self.parts: list[SchemaPart] = []
        """What the rules were written from."""

    def arguments(self, tool: Tool, source: str) -> str:
        """Return the expression of a tool's arguments, whose schema is the field `source`."""
        root = tool.parameters or {}
        described = _described(tool)
        written = []
        for name, schema in described.named.items():
            if schema is False:
                continue
            place = f"{source}.properties.{name}"
            value = self._value(schema, root, place, is_lenient=not tool.is_strict)
            argument = f"{self._key(name)} {value}"
            written.append(argument if name in described.required else f"({argument})?")
        if described.others is not False:
            place = f"{source}.additionalProperties"
            value = self._value(described.others, root, place, is_lenient=not tool.is_strict)
            written.append(f"({self._other_key(described)} {value}){{0,{_MOST_OTHERS}}}")
        return " ".join(written)

    def _key(self, name: str) -> str:
        return self._expression(f"{self._tags.before_key}{name}{self._tags.after_key}")

    def _other_key(self, described: DescribedArguments) -> str:
        """Return the expression of a name that the schema does not have, between its tags."""
        before, after = self._tags.before_key, self._tags.after_key
        tag = next((one for one in self._tokens if after.startswith(one)), "")
        if before in self._tokens and tag:
            behind = self._expression(after)
            inner = _but(f"/{_KEY}/", [f"/{pattern_of(name)}/" for name in described.named])
            return f"{self._tokens[before]} {self._terminal('KEY', inner)} {behind}"
        names = [f"/{pattern_of(before + name + after)}/" for name in described.named]
        whole = _but(f"/{pattern_of(before)}{_KEY}{pattern_of(after)}/", names)
        return self._terminal("KEY", whole)

    def _value(self, schema: Any, root: Mapping[str, Any], source: str, *, is_lenient: bool) -> str:
        """Return the rule of a value of `schema`, with the tag behind it."""
        own = _asking(schema)
        text = json.dumps(own, sort_keys=True)
        has_reference = '"$ref"' in text
        known = (text, is_lenient, id(root) if has_reference else 0)
        if known in self._values:
            return self._values[known]
        targets = self._targets(root)
        taken = taken_by(own, targets)
        rule = self._values[known] = f"value_{len(self._values)}"
        others = taken.kinds - {"string"}
        behind = self._expression(self._tags.after_end)
        if has_reference and (not taken.texts or others & {"array", "object"}):
            own = standing_alone(own, root, targets)
        if not taken.texts:
            alternatives = [self._json(own, source, is_lenient=is_lenient)]
        else:
            is_only = len(taken.texts) == 1 and not others
            alternatives = [
                self._text(text, others, source, is_lenient=is_lenient, is_only=is_only)
                for text in taken.texts
            ]
            if containers := sorted(others & {"array", "object"}):
                inner = {**own, "type": containers}
                alternatives.append(self._json(inner, source, is_lenient=is_lenient))
            if taken.scalars:
                self._count("|".join(taken.scalars))
                alternatives.append(self._ended(f"/{'|'.join(taken.scalars)}/"))
        self.lines.append(f"{rule}: ({' | '.join(alternatives)}) {behind}")
        return rule

    def _json(self, schema: Mapping[str, Any], source: str, *, is_lenient: bool) -> str:
        self.parts.append(SchemaPart(schema=schema, source=source, is_lenient=is_lenient))
        rule = json_rule(schema, is_lenient=is_lenient)
        self._count(rule)
        return f"{rule} {self._expression(self._tags.end)}"

    def _count(self, written: str) -> None:
        """Raise `InvalidRequest` where what is written has become too long: many references may
        name what is written for each."""
        self._num_chars += len(written)
        if self._num_chars > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the schemas of the arguments of tools, each with what it refers to, make a "
                f"grammar of more than {MAX_GRAMMAR_BYTES} bytes: wanted smaller ones",
                param="tools",
            )

    def _targets(self, root: Mapping[str, Any]) -> Targets:
        """Return what references to `root` name; those of one tool are asked for in a row."""
        if self._last is None or self._last[0] is not root:
            self._last = root, Targets(root)
        return self._last[1]

    def _text(
        self,
        schema: Mapping[str, Any],
        others: frozenset[str],
        source: str,
        *,
        is_lenient: bool,
        is_only: bool,
    ) -> str:
        terminal, weaker = text_expressions(schema, self._tags.end, others)
        self._count(terminal)
        if terminal != weaker:
            self.parts.append(
                SchemaPart(
                    schema=schema, source=source, is_lenient=is_lenient,
                    terminal=terminal, weaker=weaker,
                    may_be_empty=is_only and may_be_empty(schema),
                )
            )  # fmt: skip
        return self._ended(terminal)

    def _ended(self, terminal: str) -> str:
        """Return the rule of a text of a terminal with the tag behind it."""
        end, name = self._tags.end, self._terminal("TEXT", terminal)
        tag = next((one for one in self._tokens if end.endswith(one)), "")
        if tag:
            lead = end.removesuffix(tag)
            name = self._terminal("LED", f"{name} {literal(lead)}") if lead else name
            return f"{name} {self._tokens[tag]}"
        rule = f"ended_{len(self.lines)}"
        self.lines.append(f"{rule}[lazy]: {name} {literal(end)}")
        return rule

    def _terminal(self, kind: str, expression: str) -> str:
        name = f"{kind}_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name


def _described(tool: Tool) -> DescribedArguments:
    if tool.parameters is None:
        return DescribedArguments({}, frozenset(), False, ())
    return described_arguments(tool.parameters)


def _asking(schema: Any) -> dict[str, Any]:
    """Return a schema without what asks for nothing."""
    if not isinstance(schema, Mapping):
        return {}
    return {key: value for key, value in schema.items() if key not in _SAID}


def _but(expression: str, left_out: list[str]) -> str:
    return " & ".join([expression, *(f"~{one}" for one in left_out)])


def check_enforced(tool: Tool, source: str, form: str) -> None:
    """Raise `InvalidRequest` for a keyword of a strict tool's arguments that is not enforced."""
    if tool.is_strict and (unread := _described(tool).not_read):
        raise InvalidRequest(
            f"the JSON schema of {source} has {unread[0]} beside its properties, which calls of "
            f"this model ({form}) cannot follow: wanted it in a property, or no strict",
            param=source,
        )
