"""One node's speculation: which drafts each decoding sequence verifies in a step.

`ngram` and `suffix` look drafts up when a step is planned. `mtp` drafts inside the model: the
runner returns proposals with the tokens that it draws, and they are verified a step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.config import SpeculationConfig
from common.token_budget import num_speculative_tokens
from engine.core.plan import StepCosts
from engine.core.speculation.draft_length import (
    MEAN_WEIGHT,
    Acceptance,
    DraftLength,
    moving_average,
)
from engine.core.speculation.drafter import Drafter, DraftView
from engine.core.speculation.ngram import NgramDrafter
from engine.core.speculation.suffix import SuffixDrafter

_FIRST_PROBABILITY = 0.5


class SpeculatingView(DraftView, Protocol):
    """A sequence that draws a token in this step.

    `draft_token_ids` are the proposals that the runner returned with its last token (mtp), and
    `acceptance` what `learn` returned last; None at first.
    """

    @property
    def draft_token_ids(self) -> Sequence[int]: ...
    @property
    def acceptance(self) -> Acceptance | None: ...


class Speculation:
    """Drafts that pay, for the sequences of one node. One thread calls it.

    For each step: `drafts` for the decoding sequences, `num_proposals` for those that draw a token;
    after it `learn`, once for each decoding sequence; `forget` when a sequence ended.
    """

    def __init__(
        self,
        method: str,
        num_speculative_tokens: int,
        drafter: Drafter | None,
        length: DraftLength,
    ) -> None:
        self.method = method
        self.num_speculative_tokens = num_speculative_tokens
        self.drafter = drafter
        self.length = length
        self._mean = _FIRST_PROBABILITY

    def drafts(self, decoding: Sequence[SpeculatingView]) -> list[tuple[int, ...]]:
        """The drafts to verify behind each sequence's last known token, possibly none.

        Looking is free of side effects on the answer: it may be asked twice for one step.
        """
        if self.drafter is None:
            return self._returned_drafts(decoding)
        propose, most = self.drafter.propose, self.num_speculative_tokens
        lowest = self.length.lowest_chance(len(decoding))
        if lowest >= 1.0:
            return [()] * len(decoding)  # not even a certain draft pays: no need to look
        proposals = [propose(view, most, lowest) for view in decoding]
        lengths = self.length.lengths([p.chances for p in proposals])
        return [p.token_ids[:n] for p, n in zip(proposals, lengths, strict=True)]

    def num_proposals(self, drawing: Sequence[SpeculatingView]) -> list[int]:
        """How many drafts the runner may propose behind the token each of these draws (mtp)."""
        if self.drafter is not None or not drawing:
            return [0] * len(drawing)
        most = self.num_speculative_tokens
        lengths = self.length.lengths([self._chances(view, most) for view in drawing])
        period = self.length.probe_period(len(drawing))
        return [
            1 if n == 0 and self._is_probe_due(view, period) else n
            for view, n in zip(drawing, lengths, strict=True)
        ]

    def learn(
        self, acceptance: Acceptance | None, num_drafted: int, num_accepted: int
    ) -> Acceptance:
        """What is known about a decoding sequence after a step that verified these drafts."""
        if num_drafted:
            self._mean = moving_average(self._mean, num_drafted, num_accepted, MEAN_WEIGHT)
        return (acceptance or Acceptance(self._mean)).after(num_drafted, num_accepted)

    def forget(self, view: DraftView) -> None:
        """The sequence ended."""
        if self.drafter is not None:
            self.drafter.forget(view)

    def _returned_drafts(self, decoding: Sequence[SpeculatingView]) -> list[tuple[int, ...]]:
        # What was proposed is paid for but its rows: a batch that grew since may want fewer. A
        # probe is verified whatever it costs, or it was for nothing.
        pending = [tuple(view.draft_token_ids) for view in decoding]
        lengths = self.length.lengths(
            [self._chances(v, len(p)) for v, p in zip(decoding, pending, strict=True)],
            is_drafted=True,
        )
        return [
            drafts[: max(n, 1)] if len(drafts) == 1 else drafts[:n]
            for drafts, n in zip(pending, lengths, strict=True)
        ]

    def _chances(self, view: SpeculatingView, num_drafts: int) -> list[float]:
        acceptance = view.acceptance
        probability = self._mean if acceptance is None else acceptance.probability
        return [probability**j for j in range(1, num_drafts + 1)]

    def _is_probe_due(self, view: SpeculatingView, period: int) -> bool:
        acceptance = view.acceptance
        return (
            acceptance is not None
            and not view.draft_token_ids
            and acceptance.num_idle_steps >= period
        )


def make_speculation(config: SpeculationConfig, costs: StepCosts) -> Speculation | None:
    """The speculation that `config` asks for; None when it asks for none."""
    method = config.speculative_method
    if method == "none":
        return None
    most = num_speculative_tokens(method, config.num_speculative_tokens)
    drafter: Drafter | None = None
    if method == "ngram":
        drafter = NgramDrafter()
    elif method == "suffix":
        drafter = SuffixDrafter()
    return Speculation(method, most, drafter, DraftLength(costs, most))
