"""Grammars over the tokens of `hash_runner` that the router writes: calls and thinking."""

from __future__ import annotations

from collections.abc import Mapping

from common.grammar import Grammar, GrammarKind
from grammars.texts import as_lark
from router.tools.definitions import Tool, ToolUse
from router.tools.formats import HERMES
from router.tools.grammars import GrammarWriter
from router.tools.thinking import THINK, ThinkingFormat
from tests.support.engine import hash_grammars
from tests.support.engine.hash_grammars import PERSON, TOOL_TAGS

assert (THINK.end, HERMES.trigger) == ("</think>", TOOL_TAGS[0]), "tokens reach over other tags"

_TOOL = Tool(name="name", description=None, parameters=PERSON, is_strict=True)


def _called(tag_tokens: Mapping[str, int], **use: bool) -> Grammar:
    """Return the grammar of answers that may call a tool, as the router writes it."""
    tools = ToolUse(tools=(_TOOL,), callable_names=frozenset({_TOOL.name}), **use)
    text = GrammarWriter(tag_tokens).calls(HERMES, tools, ThinkingFormat.NONE)
    return Grammar(GrammarKind.LARK, text)


def _behind_thinking() -> Grammar:
    """Return the grammar of an answer that begins with thinking, as the router writes it."""
    asked = as_lark(hash_grammars.GRAMMARS[0], "asked")
    text = GrammarWriter({}).behind_thinking(asked, ThinkingFormat.BEGUN)
    return Grammar(GrammarKind.LARK, text)


MAY_CALL, MUST_CALL, THINKS = (
    _called({}),
    _called(dict.fromkeys(TOOL_TAGS, 0), must_call=True),
    _behind_thinking(),
)
GRAMMARS = [*hash_grammars.GRAMMARS, MAY_CALL, MUST_CALL, THINKS]
"""JSON, an expression, rules; then as the router writes them: free text with a call behind it, a
lazy lexeme and nested JSON; calls between tags that are tokens; and JSON behind thinking."""
