"""What a drafter sees of a sequence, and what it answers.

A drafter guesses the tokens that follow. The model draws every token itself and a guess is kept
only where it equals the drawn one, so a drafter that is wrong, stale or hostile costs time and
never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftView(Protocol):
    """One sequence: its known tokens. Outputs are only ever appended to."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...


class Proposal(NamedTuple):
    """Drafts in order; `chances[j]` is how likely draft `j` and all before it are accepted."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]


NO_PROPOSAL = Proposal((), ())


class Drafter(Protocol):
    """Looks drafts up in tokens that are known already. One thread calls it."""

    def propose(self, view: DraftView, max_drafts: int, lowest_chance: float = 0.0) -> Proposal:
        """At most `max_drafts` guesses for what follows the known tokens of `view`.

        Guesses with a chance below `lowest_chance` are of no use to the caller. Takes amortised
        constant time per new token; asked again without new tokens it answers the same.
        """

    def forget(self, view: DraftView) -> None:
        """The sequence ended: keep nothing that belongs to it alone. Unknown ones are ignored."""
