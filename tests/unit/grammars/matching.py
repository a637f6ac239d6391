"""Whether grammars and schemas allow texts."""

from __future__ import annotations

import json
from typing import Any

from common.grammar import Grammar, GrammarKind
from grammars.compiler import GrammarCompiler


def follows(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a grammar allows a text, token by token, and its end behind it."""
    matcher = compiler.matcher(grammar)
    tokens = compiler.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def follows_schema(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "guided_json")
    return follows(compiler, grammar, text)
