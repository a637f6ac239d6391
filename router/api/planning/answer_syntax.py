"""The parts that a chat's answer may have, and the grammar that it must follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from common.errors import InvalidRequest
from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from grammars.parts import NO_PARTS, GrammarParts, SchemaPart
from grammars.texts import as_lark
from router.api.bodies.asked import AskedChat
from router.text.chat.conversation import Conversation
from router.tools.answer_parser import PLAIN, AnswerSyntax
from router.tools.call_format import CallFormat
from router.tools.definitions import ToolUse
from router.tools.harmony.grammar import answers
from router.tools.harmony.message_cut import Place, place_behind
from router.tools.thinking import THINK, ThinkingFormat, thinking_behind, thinking_of_continued

_TEXT = "asked"
"""The rule of the text that a request asks for."""


class AnswerRules(NamedTuple):
    """How an answer's text is read; its grammar, if it has one; and what that was written from."""

    syntax: AnswerSyntax = PLAIN
    grammar: Grammar | None = None
    parts: GrammarParts = NO_PARTS


def answer_rules(
    chat: Conversation,
    prompt: str,
    asked_chat: AskedChat,
    asked: Grammar | None,
    name: Callable[[str], str],
    *,
    budget_in: Callable[[str], tuple[int, ...]] | None = None,
) -> AnswerRules:
    """Return how the answer behind `prompt` is read, and its grammar.

    `asked` is the grammar that the request asks for: with tools, of an answer without calls; of a
    model that thinks, of what follows its thinking. `name` is what the client calls a field.
    With `budget_in`, which returns the tokens of a text, thinking ends after a number of them.
    Raises `InvalidRequest` for tools in a format that the server does not know, or whose calls
    cannot be told from an answer of `asked`.
    """
    if chat.is_harmony:
        return _rules_of_harmony(chat, prompt, asked_chat, asked, name, budget_in)
    options, use = asked_chat.options, asked_chat.tools
    tags = chat.thinking_tags
    thinking = ThinkingFormat.NONE
    if options.continues_final_message:
        thinking = thinking_of_continued(asked_chat.messages[-1]["content"], prompt, tags)
    elif options.has_generation_prompt:
        thinking = thinking_behind(prompt, tags)
    parts_of = partial(AnswerSyntax, thinking=thinking, tags=tags or THINK)
    told = None if asked is None else replace(asked, source=name(asked.source))
    if use is None:
        syntax = parts_of()
        if told is None or thinking is ThinkingFormat.NONE:
            return AnswerRules(syntax, told)
        text = chat.grammars.behind_thinking(as_lark(told, _TEXT), thinking)
        return AnswerRules(syntax, Grammar(GrammarKind.LARK, text, told.source), GrammarParts(told))
    form = chat.call_format()
    if asked is not None and not use.must_call and not form.trigger:
        raise InvalidRequest(
            f"{asked.source} and tools cannot be told apart in an answer of this model, whose "
            f"calls ({form.name}) have no mark: wanted one of them, or tool_choice required",
            param=asked.source,
        )
    syntax = parts_of(
        call_format=form.name,
        call_names=tuple(tool.name for tool in use.callable_tools),
        kinds=form.kinds(use.callable_tools),
        is_named=use.is_named,
        calls_alone=use.must_call or asked is not None,
    )
    schemas = _schemas(chat, form, use, name)
    rule = "" if told is None else as_lark(told, _TEXT)
    grammar = _of_tools(chat.grammars.calls(form, use, thinking, rule), use, name)
    return AnswerRules(syntax, grammar, GrammarParts(told, schemas))


def _schemas(
    chat: Conversation, form: CallFormat, use: ToolUse, name: Callable[[str], str]
) -> tuple[SchemaPart, ...]:
    return chat.grammars.schema_parts(
        form, use, lambda number: name(f"tools.{number}.function.parameters")
    )


def _of_tools(text: str, use: ToolUse, name: Callable[[str], str]) -> Grammar:
    """Return a grammar of answers with tools. Raises `InvalidRequest` for one that is too long."""
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the schemas of {len(use.callable_tools)} tools make a grammar of {size} bytes, "
            f"descriptions left out: wanted at most {MAX_GRAMMAR_BYTES}, so fewer tools or smaller "
            "schemas",
            param=name("tools"),
        )
    return Grammar(GrammarKind.LARK, text, name("tools"))


def _rules_of_harmony(
    chat: Conversation,
    prompt: str,
    asked_chat: AskedChat,
    asked: Grammar | None,
    name: Callable[[str], str],
    budget_in: Callable[[str], tuple[int, ...]] | None,
) -> AnswerRules:
    """Return how an answer is read that is messages to channels, and its grammar.

    With a budget of thinking it has one: the model could begin to think again.
    """
    use, place = asked_chat.tools, place_behind(prompt)
    functions = use.callable_tools if use else ()
    syntax = AnswerSyntax(
        thinking=ThinkingFormat.TAGGED if chat.tells_thinking else ThinkingFormat.NONE,
        call_names=tuple(tool.name for tool in functions),
        is_named=use is not None and use.is_named,
        place=place,
    )
    spelt = budget_in if chat.tells_thinking and place is not Place.TEXT else None
    told = None if asked is None else replace(asked, source=name(asked.source))
    schemas = () if use is None else _schemas(chat, chat.call_format(), use, name)
    parts = GrammarParts(told, schemas) if told or schemas else NO_PARTS
    if use is None and told is None and spelt is None:
        return AnswerRules(syntax)
    rule = "" if told is None else as_lark(told, _TEXT)
    text = answers(place, use, rule, spelt=spelt)
    if use is not None:
        return AnswerRules(syntax, _of_tools(text, use, name), parts)
    source = told.source if told else "thinking_token_budget"
    return AnswerRules(syntax, Grammar(GrammarKind.LARK, text, source), parts)
