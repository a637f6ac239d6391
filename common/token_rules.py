"""Rules of one request about single tokens: biases, words that are not written, an allowed set."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest

MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
"""Sequences of tokens: a word is one or two, with and without a space before it."""
MAX_BAD_WORD_TOKENS = 32
MAX_ALLOWED_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What changes the logits of single tokens before one is drawn.

    `biases` are pairs of a token id and what is added to its logit. The last token of a sequence in
    `bad_words` is not drawn where the output ends with the ones before it. Unless
    `allowed_token_ids` is empty, no other token is drawn, the end-of-sequence token neither.

    Raises `InvalidRequest` for too many of them, for a bias out of range, and where every allowed
    token is a bad word.
    """

    biases: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, most in (
            ("logit_bias", self.biases, MAX_BIASES),
            ("bad_words", self.bad_words, MAX_BAD_WORDS),
            ("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS),
        ):
            if len(value) > most:
                raise InvalidRequest(
                    f"{name} has {len(value)} entries: wanted at most {most}", param=name
                )
        for token_id, bias in self.biases:
            if not -MAX_BIAS <= bias <= MAX_BIAS:  # NaN neither
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is {bias}: wanted -100 to 100",
                    param="logit_bias",
                )
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words has one of {len(word)} tokens: wanted 1 to {MAX_BAD_WORD_TOKENS}",
                    param="bad_words",
                )
        if self.allowed_token_ids:
            never = {word[0] for word in self.bad_words if len(word) == 1}
            if never.issuperset(self.allowed_token_ids):
                raise InvalidRequest(
                    "every token of allowed_token_ids is one of bad_words: wanted another one",
                    param="allowed_token_ids",
                )

    @property
    def highest_token_id(self) -> int:
        """The largest token id in any rule; -1 without rules."""
        biased = [token_id for token_id, _ in self.biases]
        return max([-1, *biased, *map(max, self.bad_words), *self.allowed_token_ids])


NO_RULES = TokenRules()
