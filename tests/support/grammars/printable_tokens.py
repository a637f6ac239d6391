"""Grammars over the vocabulary of the tiny checkpoints: a token for each printable character."""

from __future__ import annotations

from functools import cache

from llguidance import LLTokenizer, TokenizerWrapper

from engine.runner.grammars.masks import GrammarMasks
from tests.support.engine.hash_grammars import CompilesOnDemand
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


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Characters()), n_vocab=VOCAB_SIZE)


def masks() -> GrammarMasks:
    """Return the masks of a runner on a tiny checkpoint."""
    compiler = CompilesOnDemand(_tokenizer())
    return GrammarMasks(compiler, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=False)


def text_of(token_ids: list[int]) -> str:
    """Return the text of an output, without the token that ends it."""
    return b"".join(_TOKENS[one] for one in token_ids if one != EOS_TOKEN_ID).decode()
