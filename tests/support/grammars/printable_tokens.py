"""Grammars over the vocabulary of the tiny checkpoints: a token for each printable character."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from common.grammar import Grammar
from engine.runner.grammars.masks import GrammarMasks
from grammars.compiler import GrammarCompiler
from tests.support.models.tiny_checkpoints import VOCAB_SIZE

EOS_TOKEN_ID = 2
_FIRST = 3
_TOKENS = [b"<unused 0>", b"<unused 1>", b"<eos>"]
_TOKENS += [bytes([ord(" ") + number]) for number in range(VOCAB_SIZE - _FIRST)]


class _Characters:
    """A tokenizer in the form that llguidance asks for."""

    eos_token_id = EOS_TOKEN_ID
    bos_token_id = None
    special_token_ids = (0, 1, EOS_TOKEN_ID)
    tokens = _TOKENS

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [_FIRST + value - ord(" ") for value in data]


class _CompilesOnDemand(GrammarCompiler):
    """What a step needs is compiled then."""

    def kept(self, grammar: Grammar) -> LLMatcher:
        return self.matcher(grammar)


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Characters()), n_vocab=VOCAB_SIZE)


def masks() -> GrammarMasks:
    """Return the masks of a runner on a tiny checkpoint."""
    compiler = _CompilesOnDemand(_tokenizer())
    return GrammarMasks(compiler, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=False)


def text_of(token_ids: list[int]) -> str:
    """Return the text of an output, without the token that ends it."""
    return b"".join(_TOKENS[one] for one in token_ids if one != EOS_TOKEN_ID).decode()
