"""Grammars over the tokens of `hash_runner`: every byte is one, and so are many short texts."""

from __future__ import annotations

import json
from functools import cache
from itertools import product

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask

from common.grammar import Grammar, GrammarKind
from engine.runner.grammars.masks import PendingMasks
from grammars.compiler import GrammarCompiler

VOCAB_SIZE = 997
EOS_TOKEN_ID = 996

_TEXTS = [a + b for a, b in product("abcdefghijklmnopqrstuvwxy0", repeat=2)]
_MARKS = [
    '{"',
    '":',
    '","',
    '"}',
    '":"',
    "[{",
    "}]",
    "true",
    "null",
    ', "',
    '": "',
    "name",
    "value",
]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "value": {"enum": ["alpha", "beta"]},
        "true": {"type": "boolean"},
    },
    "required": ["name", "value", "true"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4}
TOOL_TAGS = ("<tool_call>", "</tool_call>")
"""Tokens of their own, which no text is."""
_LETTERS = "abcdefghijklmnop"
_SPLIT_TAGS = [
    before + tag + behind
    for tag in ("</think>", TOOL_TAGS[0])
    for before, behind in (*((one, "") for one in _LETTERS), *(("", one) for one in "\n {["))
]
"""Tokens of text that reach over a begin or an end, so many that random answers hold some."""

GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(NUMBERS)),
    Grammar(GrammarKind.REGEX, "(ab|cd){2,5}[0-9]?"),
    Grammar(GrammarKind.LARK, 'start: "name" ("true" | "null")'),
]


class _Words:
    """A tokenizer in the form that llguidance asks for; the longest token first."""

    eos_token_id = EOS_TOKEN_ID
    bos_token_id = None
    special_token_ids = (EOS_TOKEN_ID - 2, EOS_TOKEN_ID - 1, EOS_TOKEN_ID)

    def __init__(self) -> None:
        words = [bytes([value]) for value in range(256)]
        words += [text.encode() for text in (*_MARKS, *_TEXTS, *_SPLIT_TAGS)]
        words += [f"<unused {number}>".encode() for number in range(len(words), EOS_TOKEN_ID - 2)]
        self.tokens = [*words, *(tag.encode() for tag in TOOL_TAGS), b"<eos>"]
        self._ids = {word: token_id for token_id, word in enumerate(self.tokens)}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids, start = [], 0
        while start < len(data):
            end = next(end for end in range(start + 5, start, -1) if data[start:end] in self._ids)
            ids.append(self._ids[data[start:end]])
            start = end if end <= len(data) else len(data)
        return ids


class CompilesOnDemand(GrammarCompiler):
    """For tests that prepare no grammar: what a step needs is compiled then."""

    def kept(self, grammar: Grammar) -> LLMatcher:
        return self.matcher(grammar)


@cache
def tokenizer() -> LLTokenizer:
    """Return the tokenizer of all hash runners; it takes a while to make."""
    return LLTokenizer(TokenizerWrapper(_Words()), n_vocab=VOCAB_SIZE)


@cache
def compiler() -> GrammarCompiler:
    """Return what compiles for tests without a node."""
    return CompilesOnDemand(tokenizer())


def token_ids(text: str) -> list[int]:
    """Return the tokens of a text, the longest first."""
    return _Words()(text)


def text_of(token_ids: list[int]) -> str:
    """Return the text of an output, without the token that ends it."""
    words = _Words().tokens
    return b"".join(words[one] for one in token_ids if one != EOS_TOKEN_ID).decode()


def allowed_after(grammar: Grammar, output: list[int]) -> np.ndarray:
    """Return which tokens may follow `output`, as booleans, by a matcher made for this alone."""
    matcher = compiler().matcher(grammar)
    assert matcher.consume_tokens(output), "the output breaks its grammar"
    return allowed_by(matcher)


def allowed_by(matcher: LLMatcher) -> np.ndarray:
    """Return which tokens a matcher allows now, as booleans."""
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    fill_next_token_bitmask(matcher, mask)
    return bits(mask[0])


def allowed_ids(matcher: LLMatcher, vocab_size: int) -> np.ndarray:
    """Return the tokens that a matcher allows now, of any vocabulary."""
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    fill_next_token_bitmask(matcher, mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def whole_token(text: str) -> int:
    """Return the token of exactly this text, which the tokenizer may write otherwise."""
    return _Words().tokens.index(text.encode())


def id_of(text: str) -> int:
    """Return the token of a text that is one."""
    (token_id,) = compiler().tokenizer.tokenize_str(text)
    return int(token_id)


def allowed_in(pending: PendingMasks) -> list[np.ndarray | None]:
    """Return what each row of a step may draw, as booleans, None without a grammar."""
    allowed, found = pending.wait(), list[np.ndarray | None]()
    for row in allowed.mask_rows.tolist():
        found.append(None if row < 0 else bits(allowed.masks[row]))
    if pending.unmasked is not None:
        rows = pending.unmasked.rows
        for row, mask in zip(rows.tolist(), pending.unmasked.masked(rows).masks, strict=True):
            found[row] = bits(mask)
    return found


def bits(mask: np.ndarray) -> np.ndarray:
    """Return the bits of a mask of the vocabulary as booleans."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool)
