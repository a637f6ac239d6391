"""Speculation as the scheduler uses it: look-up methods, drafts from the runner, probes."""

from __future__ import annotations

import pytest

from common.settings.config import SpeculationConfig
from engine.core.runner_contract import StepCosts
from engine.core.speculation.draft_length import Acceptance
from engine.core.speculation.ngram import NgramDrafter
from engine.core.speculation.speculation import Speculation, make_speculation
from engine.core.speculation.suffix import SuffixDrafter
from tests.support.engine.speculation_views import COSTS, MTP_COSTS, View, text_of, view_of


def make(method: str, num: int = 0, costs: StepCosts = COSTS) -> Speculation:
    config = SpeculationConfig(speculative_method=method, num_speculative_tokens=num)
    speculation = make_speculation(config, costs)
    assert speculation is not None
    return speculation


def test_no_method_is_no_speculation() -> None:
    config = SpeculationConfig(speculative_method="none", num_speculative_tokens=4)
    assert make_speculation(config, COSTS) is None


@pytest.mark.parametrize(
    ("method", "drafter", "num"),
    [("ngram", NgramDrafter, 8), ("suffix", SuffixDrafter, 8), ("mtp", NgramDrafter, 5)],
)
def test_methods(method: str, drafter: type, num: int) -> None:
    speculation = make(method)
    assert speculation.method == method
    assert type(speculation.drafter) is drafter
    assert speculation.num_speculative_tokens == num
    assert make(method, 3).num_speculative_tokens == 3


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_look_up_drafts_on_a_narrow_batch_and_not_on_a_wide_one(method: str) -> None:
    speculation = make(method, 4)
    (drafts,) = speculation.drafts([view_of("one two three one tw")])
    assert text_of(drafts) == "o th"
    weak = [view_of("abxyab", sequence_id=i) for i in range(2, 66)]
    assert set(speculation.drafts(weak)) == {()}
    assert speculation.num_proposals(weak) == [0] * 64
    assert speculation.drafts([]) == []


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_look_up_drafts_come_back_with_a_copy_however_long_they_failed(method: str) -> None:
    speculation, view = make(method), view_of("")
    for i in range(1000, 1200):
        view.output_token_ids += [7, 7, i]
        speculation.drafts([view])
    view.output_token_ids += [7, 7]
    assert speculation.drafts([view]) == [()]
    view.output_token_ids += [1000, 7, 7, 1001, 7, 7]  # a copy of the beginning sets in
    for _ in range(8):
        speculation.drafts([view])
        view.output_token_ids.append(view.output_token_ids[len(view.output_token_ids) - 606])
    assert len(speculation.drafts([view])[0]) >= 4


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_forgetting_reaches_the_drafter(method: str) -> None:
    speculation, view = make(method), view_of("abcab")
    speculation.drafts([view])
    speculation.forget(view)
    drafter = speculation.drafter
    assert isinstance(drafter, NgramDrafter | SuffixDrafter)
    assert drafter.num_sequences == 0


# --- drafts from the runner -----------------------------------------------------------------------


def step(speculation: Speculation, view: View, acceptance: float) -> tuple[int, int]:
    """One step of a sequence alone: (drafts verified, drafts proposed). Accepts all or none."""
    (drafts,) = speculation.drafts([view])
    (num_proposals,) = speculation.num_proposals([view])
    view.acceptance = speculation.learn(view, len(drafts), round(len(drafts) * acceptance))
    view.proposed_token_ids = tuple(range(num_proposals))
    return len(drafts), num_proposals


def test_returned_drafts_are_verified_a_step_later() -> None:
    speculation, view = make("mtp", 3, costs=MTP_COSTS), view_of("x")
    steps = [step(speculation, view, 1) for _ in range(30)]
    verified, proposed = zip(*steps, strict=True)
    assert verified[0] == 0 < proposed[0]
    assert verified[1:] == proposed[:-1]
    assert steps[-1] == (3, 3)


def test_a_wide_batch_asks_for_no_proposals_and_drops_those_it_has() -> None:
    speculation = make("mtp", 3, costs=MTP_COSTS)
    views = [View([1], sequence_id=i, proposed_token_ids=(5, 6)) for i in range(64)]
    assert speculation.num_proposals(views) == [0] * 64
    assert speculation.drafts(views) == [()] * 64
    assert speculation.drafts(views[:1]) == [(5, 6)]


def test_useless_drafts_end_and_cost_less_than_two_percent() -> None:
    speculation, view = make("mtp", 3, costs=MTP_COSTS), view_of("x")
    length = speculation.length
    plain_s = spent_s = 0.0
    steps = [step(speculation, view, 0) for _ in range(2000)]
    for verified, proposed in steps:
        plain_s += length.cost_s(1)
        spent_s += length.cost_s(1 + verified) + proposed * MTP_COSTS.draft_s
    assert any(verified for verified, _ in steps[1000:]), "never tries again"
    assert spent_s < 1.02 * plain_s


def test_a_probe_is_due_after_its_period_and_not_before() -> None:
    speculation, view = make("mtp", 3, costs=MTP_COSTS), view_of("x")
    period = speculation.length.probe_period(1)
    assert period > 1
    for num_idle_steps, num_proposals in ((period - 1, 0), (period, 1), (period + 1, 1)):
        view.acceptance = Acceptance(0.0, num_idle_steps)
        assert speculation.num_proposals([view]) == [num_proposals]


def test_drafts_return_soon_after_acceptance_does() -> None:
    speculation, view = make("mtp", 3, costs=MTP_COSTS), view_of("x")
    for _ in range(300):
        step(speculation, view, 0)
    lengths = [step(speculation, view, 1)[0] for _ in range(5 * length_of_a_probe(speculation))]
    assert lengths[-1] == 3


def length_of_a_probe(speculation: Speculation) -> int:
    return speculation.length.probe_period(1) + 2


def test_a_new_sequence_starts_from_what_others_met() -> None:
    good, bad = make("mtp", 3, costs=MTP_COSTS), make("mtp", 3, costs=MTP_COSTS)
    new = view_of("x")
    for _ in range(200):
        good.learn(new, 3, 3)
        bad.learn(new, 3, 0)
    assert good.num_proposals([new]) == [3]
    assert bad.num_proposals([new]) == [0]
    assert good.learn(new, 0, 0).probability > 0.9 > bad.learn(new, 0, 0).probability


def test_a_long_match_knows_better_than_the_layer() -> None:
    speculation = make("mtp", 3, costs=MTP_COSTS)
    repeating = view_of("one two three four one two three ")
    repeating.proposed_token_ids = (1, 2, 3)
    (drafts,) = speculation.drafts([repeating])
    assert drafts == tuple(b"fou")
    assert speculation.drafts([repeating]) == [drafts], "asked twice it answers the same"
    # What became of it says nothing about the layer.
    before = speculation.num_proposals([view_of("x")])
    learnt = [speculation.learn(repeating, 3, 0) for _ in range(50)]
    assert len(set(learnt)) == 1
    assert speculation.num_proposals([view_of("x")]) == before
    speculation.forget(repeating)
    assert speculation.learn(repeating, 3, 0).probability < learnt[0].probability


def test_without_a_match_the_layer_drafts() -> None:
    speculation = make("mtp", 3, costs=MTP_COSTS)
    view = view_of("abcdefgh")
    view.proposed_token_ids = (1, 2, 3)
    (drafts,) = speculation.drafts([view])
    assert drafts == (1, 2, 3)[: len(drafts)] != ()
    assert speculation.learn(view, 3, 0).probability < 0.5
