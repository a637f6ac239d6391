"""Stop strings of one choice: searched in a part of its answer, and after its first tokens.

Thinking and calls are outside of that part, and a stop string that ends in the text of the first
tokens is text like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.text.output.stop_strings import NO_TOKENS, StopStrings
from router.tools.stop_scope import MessageScope, StopScope


class StopSearch:
    """Holds back the text of a choice that may belong to a stop string."""

    def __init__(
        self,
        stop: Sequence[str],
        *,
        is_shown: bool,
        min_tokens: int,
        scope: StopScope | MessageScope | None,
        named_tokens: Mapping[str, int] = NO_TOKENS,
    ) -> None:
        """Begin a choice, which no stop string ends before `min_tokens` tokens, nor out of `scope`.

        `is_shown`: the stop string that ends the choice is a part of its text. `named_tokens`: see
        `StopStrings`.
        """
        self._stops = StopStrings(stop, is_shown=is_shown, named_tokens=named_tokens)
        self._scope = scope
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_unstoppable = 0
        """Characters of the first tokens that are not searched yet."""

    @property
    def found(self) -> str | None:
        """The stop string that ended the choice."""
        return self._stops.found

    @property
    def mark_of(self) -> Mapping[int, str]:
        """The marks of tokens that stop strings name, by token id: a part of their text."""
        return self._stops.mark_of

    def push(self, text: str) -> str:
        """Add the text of the next token, which may be ''; return the text that can be shown."""
        self._num_tokens += 1
        return self._show(text)

    def end(self, text: str) -> str:
        """Add the text after the last token; return all text that is left, up to a stop string."""
        return self._show(text, is_last=True) + self._stops.flush()

    def _show(self, text: str, *, is_last: bool = False) -> str:
        if self._num_tokens <= self._min_tokens:
            self._num_unstoppable += len(text)
        if self._scope is None:
            return self._search(text)
        shown = ""
        for thought, searched, called in self._scope.push(text, is_last=is_last):
            self._count(thought)
            shown += thought + self._search(searched)
            if self._stops.is_stopped:
                return shown
            if called:
                self._count(called)
                shown += self._stops.flush() + called
        return shown

    def _count(self, text: str) -> None:
        """Note text of the first tokens that is not searched."""
        self._num_unstoppable = max(self._num_unstoppable - len(text), 0)

    def _search(self, text: str) -> str:
        """Return what of `text` is before a stop string, without what may begin one."""
        unstoppable, text = text[: self._num_unstoppable], text[self._num_unstoppable :]
        self._num_unstoppable -= len(unstoppable)
        shown = self._stops.push(unstoppable, can_stop=False)
        return shown + self._stops.push(text)
