"""Log probabilities of a prompt's own tokens, as entries of its echo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from common.prompt_logprobs import PromptLogprobs
from common.request import TokenLogprobs
from router.text.output.choice_text import LogprobEntry


class EchoedEntries(Sequence[LogprobEntry]):
    """The entries of a prompt that is shown; nothing is known of its first token.

    Each is made when it is read: a prompt can have 100,000 of them.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        text_offsets: Sequence[int],
        num_top: int,
        found: PromptLogprobs | None,
        places: range | None = None,
    ) -> None:
        """Show a prompt. `text_offsets` is where each token's text starts, and `found` None for a
        prompt of one token. `places`: the tokens whose entries these are; all unless it is given.
        """
        self._token_ids, self._text_offsets = token_ids, text_offsets
        self._num_top, self._found = num_top, found
        self._places = range(1 if found is None else 1 + len(found)) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> LogprobEntry: ...

    @overload
    def __getitem__(self, index: slice) -> EchoedEntries: ...

    def __getitem__(self, index: int | slice) -> LogprobEntry | EchoedEntries:
        if isinstance(index, int):
            return self._entry(self._places[index])
        facts = (self._token_ids, self._text_offsets, self._num_top, self._found)
        return EchoedEntries(*facts, self._places[index])

    def _entry(self, place: int) -> LogprobEntry:
        own, found = None, self._found
        if place and found is not None:
            own = TokenLogprobs(found.logprobs[place - 1], found.top(place - 1, self._num_top))
        return LogprobEntry(self._token_ids[place], own, self._text_offsets[place])
