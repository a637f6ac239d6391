"""The matcher of a seat: where it comes from, and how it follows the seat's output."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llguidance import LLMatcher

from common.errors import InternalError
from common.grammar import Grammar
from common.observing.histogram import HistogramView
from grammars.heap import allocated_bytes

COSTLY_S = 0.0002
"""A mask that finds no new states takes less: 0.03 ms is usual with 49,152 tokens."""
MOST_BYTES_PER_S = 1_000_000_000
"""More than new states were seen to take for each second in which masks found them."""


_NAMED_BY_ID = "<["
"""How a grammar names a token by its id. A matcher of llguidance 1.9.1 that has consumed such a
token, if that has a text, does not return to the states before it: a rollback ends in others."""


class Matchers(Protocol):
    """Where matchers come from: `grammars.compiler.GrammarCompiler`."""

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar, unless it is kept. Raises `PdserveError`."""

    def hold(self, grammar: Grammar) -> bool:
        """Keep a compiled grammar as long as this object lives; False: it is not compiled."""

    def kept(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher that has consumed nothing; never compile. Raises `PdserveError`."""

    def count_followed(self, grammar: Grammar, num_tokens: int) -> None:
        """Note that so many more tokens are drawn under a grammar."""

    def grow(self, grammar: Grammar, num_bytes: int) -> None:
        """Note that a mask made a grammar larger. Raises `PdserveError` where there is no room."""

    def forget(self, grammar: Grammar) -> None:
        """Drop the compiled grammar: the next request compiles it again."""

    @property
    def writes_every_byte(self) -> bool:
        """Whether the model's tokens can write any text."""

    @property
    def num_cached(self) -> int: ...
    @property
    def cached_bytes(self) -> int: ...
    def lookups(self) -> Mapping[str, int]: ...
    def compile_s(self) -> Mapping[str, HistogramView]: ...


class Growth:
    """By how much the masks of a matcher make its grammar larger.

    llguidance does not say what the states of a lexer take, so the heap is measured around a mask;
    other threads allocate meanwhile, and measuring takes a part of a millisecond. Masks that find
    no new states take less: they are not measured, nor is the first one that takes longer.
    """

    def __init__(self) -> None:
        self._is_costly = False
        self._before = 0
        self._began_s = 0.0

    def begin(self) -> None:
        """Note what there is before the masks of a step are filled."""
        self._before = allocated_bytes() if self._is_costly else 0
        self._began_s = time.thread_time()

    def end(self) -> int:
        """Return by how many bytes the grammar has grown meanwhile, on the same thread."""
        took_s, was_costly = time.thread_time() - self._began_s, self._is_costly
        self._is_costly = took_s >= COSTLY_S
        most = int(took_s * MOST_BYTES_PER_S)
        if not self._is_costly:
            return 0
        return min(most, max(0, allocated_bytes() - self._before)) if was_costly else most // 2


@dataclass(slots=True)
class HeldMatcher:
    """The matcher of a seat, and the tokens that it has consumed.

    `forced` are the tokens that the grammar forces after the first `num_before` of them; below 0
    they have not been looked for. `growth` is what its masks add to the grammar.
    """

    grammar: Grammar
    matcher: LLMatcher
    token_ids: list[int]
    forced: tuple[int, ...] = ()
    num_before: int = -1
    growth: Growth = field(default_factory=Growth)

    def can_move(self, output: Sequence[int]) -> bool:
        """Return whether `move` takes the matcher to the state after `output`."""
        had = self.token_ids
        return had == output[: len(had)] or _NAMED_BY_ID not in self.grammar.text

    def move(self, output: Sequence[int]) -> None:
        """Move the matcher to the state after exactly `output`. Raises `InternalError`."""
        had, num_same = self.token_ids, 0
        if had != output[: len(had)]:
            while num_same < len(output) and had[num_same] == output[num_same]:
                num_same += 1
            if not (self.can_move(output) and self.matcher.rollback(len(had) - num_same)):
                raise InternalError("a matcher does not return to earlier tokens")
            del had[num_same:]
            self.num_before = -1
        for token_id in output[len(had) :]:
            self.consume(token_id)

    def next_forced(self) -> Sequence[int]:
        """Return the tokens that must follow; they are looked for once."""
        if self.num_before == len(self.token_ids):
            return self.forced
        return self.matcher.compute_ff_tokens()

    def consume(self, token_id: int) -> None:
        """Consume one more token. Raises `InternalError`."""
        if not self.matcher.consume_token(token_id):
            problem = self.matcher.get_error().partition("\n")[0]
            raise InternalError(f"token {token_id} was drawn and is refused: {problem}")
        self.token_ids.append(token_id)
