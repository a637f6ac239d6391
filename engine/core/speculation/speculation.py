"""One node's speculation: which drafts each decoding sequence verifies in a step.

`ngram` and `suffix` look drafts up when a step is planned. With `mtp` a layer of the model drafts:
the runner returns proposals with the tokens that it draws, and they are verified a step later.
Where text repeats, looked-up drafts are better, and are taken instead. Tokens that a grammar forces
are drafts with every method, and with `grammar` the only ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.kv.token_budget import num_speculative_tokens
from common.settings.config import SpeculationConfig
from engine.core.runner_contract import StepCosts
from engine.core.speculation.draft_length import (
    MEAN_WEIGHT,
    Acceptance,
    DraftLength,
    moving_average,
)
from engine.core.speculation.drafter import (
    NO_PROPOSAL,
    Drafter,
    DraftView,
    NoDrafter,
    Proposal,
)
from engine.core.speculation.ngram import NgramDrafter
from engine.core.speculation.suffix import SuffixDrafter

_FIRST_PROBABILITY = 0.3
"""Estimate before any draft was verified: enough to draft in a narrow batch, not in a wide one."""


class SpeculatingView(DraftView, Protocol):
    """A sequence that draws a token in this step.

    `proposed_token_ids` are the drafts that the runner returned with its last token (mtp).
    `forced_token_ids` are certain: a grammar allows no others. `acceptance` is the last result of
    `learn`; None at first.
    """

    @property
    def proposed_token_ids(self) -> Sequence[int]: ...
    @property
    def forced_token_ids(self) -> Sequence[int]: ...
    @property
    def acceptance(self) -> Acceptance | None: ...


class Speculation:
    """The drafts that pay, for the sequences of one node. Used by one thread.

    For each step: `drafts` for the decoding sequences and `num_proposals` for those that draw a
    token; after it `observe`, and `learn` once for each decoding sequence; `forget` when a sequence
    ended.
    """

    def __init__(
        self,
        method: str,
        num_speculative_tokens: int,
        drafter: Drafter,
        length: DraftLength,
    ) -> None:
        self.method = method
        self.num_speculative_tokens = num_speculative_tokens
        self.drafter = drafter
        self.length = length
        self.has_proposals = method == "mtp"
        """Whether the runner proposes drafts with the tokens that it draws."""
        self._mean = _FIRST_PROBABILITY
        self._looked_up: set[int] = set()

    def drafts(self, decoding: Sequence[SpeculatingView]) -> list[tuple[int, ...]]:
        """Return the drafts to verify after each sequence's last known token, possibly none.

        A second call for the same step returns the same.
        """
        lowest = self.length.lowest_chance(len(decoding))
        candidates = [self._candidate(view, lowest) for view in decoding]
        # The drafts exist already, so they cost only their rows.
        lengths = self.length.lengths([c.chances for c in candidates], is_drafted=True)
        return [
            candidate.token_ids[: self._at_least(view, n)]
            for view, candidate, n in zip(decoding, candidates, lengths, strict=True)
        ]

    def num_proposals(self, drawing: Sequence[SpeculatingView]) -> list[int]:
        """Return how many drafts the runner may propose after each drawn token (mtp)."""
        if not self.has_proposals or not drawing:
            return [0] * len(drawing)
        most = self.num_speculative_tokens
        lengths = self.length.lengths([self._chances(view, most) for view in drawing])
        period = self.length.probe_period(len(drawing))
        return [
            1 if n == 0 and self._is_probe_due(view, period) else n
            for view, n in zip(drawing, lengths, strict=True)
        ]

    def learn(self, view: SpeculatingView, num_drafted: int, num_accepted: int) -> Acceptance:
        """Return the acceptance of a decoding sequence after a step that verified these drafts."""
        acceptance = view.acceptance or Acceptance(self._mean)
        if view.sequence_id in self._looked_up:
            return acceptance  # looked-up drafts do not measure the drafting layer
        if num_drafted:
            self._mean = moving_average(self._mean, num_drafted, num_accepted, MEAN_WEIGHT)
        return acceptance.after(num_drafted, num_accepted)

    def observe(self, rows: int, step_s: float, num_proposals: int) -> None:
        """Learn what a step cost: all of its tokens, and the drafts that the runner made in it."""
        self.length.observe(rows, step_s, num_proposals)

    def forget(self, view: DraftView) -> None:
        """Drop the state of a sequence that ended."""
        self._looked_up.discard(view.sequence_id)
        self.drafter.forget(view)

    def _candidate(self, view: SpeculatingView, lowest_chance: float) -> Proposal:
        """Return the more promising drafts: looked up, or proposed by the runner (mtp)."""
        found = NO_PROPOSAL
        if lowest_chance < 1.0:  # otherwise not even a certain draft pays
            found = self.drafter.propose(view, self.num_speculative_tokens, lowest_chance)
        forced = view.forced_token_ids[: self.num_speculative_tokens]
        if not self.has_proposals:
            return _after_forced(forced, found)
        chances = self._chances(view, len(view.proposed_token_ids))
        if sum(found.chances) <= sum(chances):
            found = Proposal(tuple(view.proposed_token_ids), tuple(chances))
            if not forced:
                self._looked_up.discard(view.sequence_id)
                return found
        self._looked_up.add(view.sequence_id)
        return _after_forced(forced, found)

    def _at_least(self, view: SpeculatingView, length: int) -> int:
        """Return `length`, but at least 1 for a probe: drafting it would be wasted otherwise."""
        is_probe = len(view.proposed_token_ids) == 1 and view.sequence_id not in self._looked_up
        return max(length, 1) if is_probe else length

    def _chances(self, view: SpeculatingView, num_drafts: int) -> list[float]:
        acceptance = view.acceptance
        probability = self._mean if acceptance is None else acceptance.probability
        return [probability**j for j in range(1, num_drafts + 1)]

    def _is_probe_due(self, view: SpeculatingView, period: int) -> bool:
        acceptance = view.acceptance
        return (
            acceptance is not None
            and not view.proposed_token_ids
            and acceptance.num_idle_steps >= period
        )


def _after_forced(forced: Sequence[int], found: Proposal) -> Proposal:
    """Return drafts that begin with the forced tokens, and go on where `found` has them too."""
    if not forced:
        return found
    certain = (1.0,) * len(forced)
    if found.token_ids[: len(forced)] != tuple(forced):
        return Proposal(tuple(forced), certain)
    reached = found.chances[len(forced) - 1]
    behind = tuple(chance / reached for chance in found.chances[len(forced) :]) if reached else ()
    return Proposal(found.token_ids[: len(forced) + len(behind)], certain + behind)


def make_speculation(config: SpeculationConfig, costs: StepCosts) -> Speculation | None:
    """Return the speculation that `config` asks for; None for the method "none"."""
    method = config.speculative_method
    if method == "none":
        return None
    most = num_speculative_tokens(method, config.num_speculative_tokens)
    drafter: Drafter = NgramDrafter()
    if method in ("suffix", "grammar"):
        drafter = SuffixDrafter() if method == "suffix" else NoDrafter()
    return Speculation(method, most, drafter, DraftLength(costs, most))
