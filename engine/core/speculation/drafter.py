"""The interface between a drafter and a sequence.

A drafter proposes the tokens that follow. The model draws every token itself, and a draft is kept
only where it equals the drawn token. So a drafter that is wrong, stale or hostile costs time and
never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftView(Protocol):
    """The known tokens of one sequence. Outputs are only ever appended to."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def num_known(self) -> int: ...
    def tokens(self, start: int, end: int) -> Sequence[int]: ...


class Proposal(NamedTuple):
    """Drafts in order; `chances[j]` is the chance that draft `j` and all before it are accepted."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]


NO_PROPOSAL = Proposal((), ())


class Drafter(Protocol):
    """Looks up drafts in tokens that are known already. Used by one thread."""

    def propose(self, view: DraftView, max_drafts: int, lowest_chance: float = 0.0) -> Proposal:
        """Return at most `max_drafts` drafts for what follows the known tokens of `view`.

        The caller has no use for drafts with a chance below `lowest_chance`. Takes amortised
        constant time per new token. Without new tokens the result is the same again.
        """

    def forget(self, view: DraftView) -> None:
        """Drop the state of a sequence that ended; unknown sequences are ignored."""


class NoDrafter:
    """Proposes nothing."""

    def propose(self, view: DraftView, max_drafts: int, lowest_chance: float = 0.0) -> Proposal:
        """Return no drafts."""
        return NO_PROPOSAL

    def forget(self, view: DraftView) -> None:
        """Do nothing: there is no state."""
