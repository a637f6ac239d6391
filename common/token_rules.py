"""Rules of one request about single tokens: biases, words that are not written, an allowed set,
and where thinking ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest

MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
"""Sequences of tokens: a word is one or two, with and without a space before it."""
MAX_BAD_WORD_TOKENS = 32
MAX_ALLOWED_TOKENS = 16_384


MAX_THINKING_TOKENS = 2**31 - 1
MAX_BEGIN_TOKENS = 32
"""Tokens with which thinking begins: one tag, or a header of a few words."""
_MOST_LATER = 8
"""Tokens by which a grammar may put off the last tag. It takes one behind a whole character alone,
and a character has at most four tokens; a token may end one and begin the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """The most tokens of an output's thinking, between its tags, which are tokens.

    Behind `num_tokens` of them comes `end_token_id`, the last tag, or where a grammar takes it
    next. Without `begin_token_ids` the output begins within the thinking. With them it thinks if
    they are its first tokens, or stand behind its first one: models may write white space before
    them. The output's tokens alone decide where the budget is spent, so it is the same index on
    every node. Raises `InvalidRequest` for a number out of range, and for too many first tokens.
    """

    num_tokens: int
    end_token_id: int
    begin_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.begin_token_ids) > MAX_BEGIN_TOKENS:
            raise InvalidRequest(
                f"thinking begins with {len(self.begin_token_ids)} tokens: wanted at most "
                f"{MAX_BEGIN_TOKENS}"
            )
        if not 0 <= self.num_tokens <= MAX_THINKING_TOKENS:
            raise InvalidRequest(
                f"the thinking budget is {self.num_tokens}: wanted 0 to {MAX_THINKING_TOKENS}"
            )

    def indices(self, *, has_grammar: bool) -> range:
        """Return the indices of the output's tokens that may be the forced one."""
        least = len(self.begin_token_ids)
        most = least + bool(least)
        later = _MOST_LATER if has_grammar else 0
        return range(least + self.num_tokens, most + self.num_tokens + later + 1)

    def is_spent(self, output_token_ids: Sequence[int], *, has_grammar: bool) -> bool:
        """Return whether the token behind this output is the last tag, whatever is likelier.

        A grammar that does not take it there is asked again one token later.
        """
        start = self._start(output_token_ids)
        if start is None:
            return False
        thought = output_token_ids[start:]
        num_later = len(thought) - self.num_tokens
        is_place = 0 <= num_later <= (_MOST_LATER if has_grammar else 0)
        return is_place and self.end_token_id not in thought

    def _start(self, output_token_ids: Sequence[int]) -> int | None:
        """Return where the thinking of an output starts; None: it has none, or none yet."""
        begin, size = self.begin_token_ids, len(self.begin_token_ids)
        if not begin:
            return 0
        first = tuple(output_token_ids[: size + 1])
        return next((n + size for n in range(2) if first[n : n + size] == begin), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What changes the logits of single tokens before one is drawn.

    `biases` are pairs of a token id and what is added to its logit. The last token of a sequence in
    `bad_words` is not drawn where the output ends with the ones before it. Unless
    `allowed_token_ids` is empty, no other token is drawn, the end-of-sequence token neither. Where
    the budget of `thinking` is spent its last tag is drawn, whatever else is said here.

    Raises `InvalidRequest` for too many of them, for a bias out of range, and where every allowed
    token is a bad word.
    """

    biases: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None

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
    def are_everywhere(self) -> bool:
        """Whether there are rules for every token, and not for the end of thinking alone."""
        return bool(self.biases or self.bad_words or self.allowed_token_ids)

    @property
    def highest_token_id(self) -> int:
        """The largest token id in any rule; -1 without rules."""
        biased = [token_id for token_id, _ in self.biases]
        tags = []
        if self.thinking is not None:
            tags = [self.thinking.end_token_id, *self.thinking.begin_token_ids]
        return max([-1, *biased, *map(max, self.bad_words), *self.allowed_token_ids, *tags])


NO_RULES = TokenRules()
