"""Grammars of answers that hold calls, and of answers after thinking, in llguidance's Lark.

Without a call that must be made, the answer is free text, or free text up to a trigger and a call
after it. No trigger stands in free text without a call after it. After the last call the answer
ends.

A tag that is a token of its own in the tokenizer is a token in the grammar too, written without
quotes, or by its id where there are no angle brackets around it; free text does not hold such
tokens. Another tag is text: there a lazy lexeme ends free text at the first tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammars.parts import SchemaPart
from grammars.texts import json_rule
from router.tools.call_format import CallFormat
from router.tools.definitions import Tool, ToolUse
from router.tools.tagged.rules import TaggedRules, check_enforced
from router.tools.thinking import THINK, ThinkingFormat, ThinkingTags

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}

_ANY = r"(.|\n)*"
_IN_LARK = re.compile(r"<[!-;=?-~]+>")
"""The texts of tokens that are written as they are."""


class GrammarWriter:
    """Writes the grammars of one model's answers.

    `tag_tokens` are the ids of the tags that are tokens, and `tags` those of its thinking.
    """

    def __init__(self, tag_tokens: Mapping[str, int], tags: ThinkingTags = THINK) -> None:
        self._tokens = {
            tag: tag if _IN_LARK.fullmatch(tag) else f"<[{token_id}]>"
            for tag, token_id in tag_tokens.items()
        }
        self._tags = tags

    def calls(
        self, form: CallFormat, use: ToolUse, thinking: ThinkingFormat, text_rule: str = ""
    ) -> str:
        """Return the grammar of the answers to a request with tools.

        With a `text_rule`, which defines the rule `asked`, an answer without calls is of that rule.
        """
        tools = use.callable_tools
        most = form.most_calls if use.is_parallel else 1
        rules = self._call_rules(form, tools)
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        more = f"({self._expression(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
        calls = f"{self._expression(form.opening)} call {more} {self._expression(form.closing)}"
        space = '" "?' if form.may_be_spaced else ""
        calls = f"{space} {calls}"
        first = self._expression(form.trigger)
        if use.must_call:
            return self._lark(f"{first} {calls}", rules, thinking)
        if text_rule:
            return self._lark(f"asked | {first} {calls}", [*rules, text_rule], thinking)
        # What begins with thinking is thinking.
        no_thought = ""
        if thinking is ThinkingFormat.TAGGED:
            no_thought = rf" & ~/\s*{_pattern(self._tags.begin)}{_ANY}/"
        if not form.trigger:
            # The first character of a call is the answer's first one that is no white space.
            rules.append(rf"TEXT: /\s*[^{{\s]{_ANY}/{no_thought}")
            return self._lark(f'"" | TEXT | {calls}', rules, thinking)
        rules += self._up_to("before", form.trigger, no_thought)
        rules.append(f"TEXT: {self._free(form.trigger)}{no_thought}")
        return self._lark(f"TEXT | before {calls}", rules, thinking)

    def behind_thinking(self, text_rule: str, thinking: ThinkingFormat) -> str:
        """Return the grammar of what may be thought, and then of the rule `asked`."""
        return self._lark("asked", [text_rule], thinking)

    def _lark(self, answer: str, rules: list[str], thinking: ThinkingFormat) -> str:
        lines = [f"answer: {answer}", *rules]
        if thinking is ThinkingFormat.NONE:
            lines.insert(0, "start: answer")
        else:
            lines += self._up_to("thought", self._tags.end)
            space = r"/[ \n]{0,4}/"
            thought = f"thought {space}"
            if thinking is ThinkingFormat.TAGGED:
                thought = f"({space} {self._expression(self._tags.begin)} {thought})?"
            lines.insert(0, f"start: {thought} answer")
        return "\n".join(lines) + "\n"

    def _up_to(self, rule: str, tag: str, but: str = "") -> list[str]:
        """Return the rules of free text that ends with the first `tag`."""
        if tag in self._tokens:
            terminal = rule.upper()
            return [
                f"{rule}: {terminal} {self._tokens[tag]}",
                f"{terminal}: {self._free(tag)}{but}",
            ]
        return [f"{rule}[lazy]: /{_ANY}{_pattern(tag)}/{but}"]

    def _free(self, tag: str) -> str:
        """Return the expression of free text, in which no tokens spell a tag that is a token."""
        if tag in self._tokens:
            return f"/{_ANY}/ & ~/{_ANY}{_pattern(tag)}{_ANY}/"
        return f"/{_ANY}/"

    def _call_rules(self, form: CallFormat, tools: Sequence[Tool]) -> list[str]:
        """Return the rule of each tool's call, from the name on, and those that these name."""
        tagged = self._tagged_rules(form)
        rules = []
        for number, tool in enumerate(tools):
            before = self._expression(tool.name + form.after_name)
            if form.before_id:
                an_id = f"({self._expression(form.before_id)} /[a-zA-Z0-9]{{9}}/)?"
                before = f'"{tool.name}" {an_id} {self._expression(form.after_name)}'
            if tagged:
                arguments = tagged.arguments(tool, "")
            else:
                arguments = json_rule(arguments_schema(tool), is_lenient=not tool.is_strict)
            rules.append(f"call_{number}: {before} {arguments} {self._expression(form.end)}")
        return rules + (tagged.lines if tagged else [])

    def _tagged_rules(self, form: CallFormat) -> TaggedRules | None:
        return TaggedRules(form.tagged, self._tokens, self._expression) if form.tagged else None

    def schema_parts(
        self, form: CallFormat, use: ToolUse, source: Callable[[int], str]
    ) -> tuple[SchemaPart, ...]:
        """Return the schemas that are enforced in calls; `source` is the field of a tool's schema,
        by the number of the tool.

        Raises `InvalidRequest` for a keyword of the arguments of a strict tool that cannot be
        enforced in this format.
        """
        tagged = self._tagged_rules(form)
        parts = []
        for number, tool in enumerate(use.tools):
            if tool.name not in use.callable_names:
                continue
            if tagged:
                check_enforced(tool, source(number), form.name)
                tagged.arguments(tool, source(number))
            else:
                parts.append(
                    SchemaPart(
                        schema=arguments_schema(tool),
                        source=source(number),
                        is_lenient=not tool.is_strict,
                    )
                )
        return tuple(tagged.parts if tagged else parts)

    def _expression(self, text: str) -> str:
        """Return the Lark expression of `text`, with its tags as tokens where they are tokens."""
        if not self._tokens:
            return json.dumps(text) if text else ""
        tags = "|".join(sorted(map(re.escape, self._tokens)))
        parts = [part for part in re.split(f"({tags})", text) if part]
        return " ".join(self._tokens.get(part) or json.dumps(part) for part in parts)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema that is enforced of a tool's arguments."""
    schema = _NO_ARGUMENTS if tool.parameters is None else tool.parameters
    return {**schema, "type": "object"}


def _pattern(text: str) -> str:
    """Return the pattern of a text between slashes."""
    return re.escape(text).replace("/", r"\/")
