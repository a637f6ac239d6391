"""The matcher of a seat: where it comes from, and how it follows the seat's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llguidance import LLMatcher

from common.errors import InternalError
from common.grammar import Grammar
from common.histogram import HistogramView


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

    def forget(self, grammar: Grammar) -> None:
        """Compile this grammar anew for the next request."""

    @property
    def num_cached(self) -> int: ...
    @property
    def cached_bytes(self) -> int: ...
    def lookups(self) -> Mapping[str, int]: ...
    def compile_s(self) -> Mapping[str, HistogramView]: ...


@dataclass(slots=True)
class HeldMatcher:
    """The matcher of a seat, and the tokens that it has consumed.

    `forced` are the tokens that the grammar forces behind the first `num_before` of them; below 0
    they have not been looked for.
    """

    grammar: Grammar
    matcher: LLMatcher
    token_ids: list[int]
    forced: tuple[int, ...] = ()
    num_before: int = -1

    def move(self, output: Sequence[int]) -> None:
        """Let the matcher have consumed `output` and nothing else. Raises `InternalError`."""
        had, num_same = self.token_ids, 0
        if had != output[: len(had)]:
            while num_same < len(output) and had[num_same] == output[num_same]:
                num_same += 1
            if not self.matcher.rollback(len(had) - num_same):
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
