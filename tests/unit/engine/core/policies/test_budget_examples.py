"""The token budget of planned steps: what decodes and their drafts leave for prefills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from common.kv.token_budget import num_speculative_tokens
from common.settings.config import SchedulingConfig
from engine.core.planner_contract import PlanPolicy, SequenceView, StepLimits, StepPlan
from engine.core.planning.planner import plan_step
from engine.core.policies.reservation import make_reservation
from engine.core.policies.victims import VICTIM_ORDERS
from engine.core.sequences.status import SequenceStatus
from tests.support.engine.planner_views import growth_columns
from tests.support.engine.policy_views import BLOCK_SIZE

PREFILL_ID = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A sequence in the middle of its output, or of its prompt; its table is full."""

    sequence_id: int
    status: SequenceStatus
    num_known: int
    num_computed: int
    block_table: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    num_prompt: int = 64
    max_new_tokens: int = 4000
    priority: int = 0
    has_remote_kv: bool = False
    num_swapped: int = 0
    num_bypassed: int = 0
    num_output_since_resume: int | None = None

    @property
    def arrival(self) -> int:
        return self.sequence_id

    @property
    def num_output(self) -> int:
        return max(self.num_known - self.num_prompt, 0)

    @property
    def num_held_blocks(self) -> int:
        return len(self.block_table)


@dataclass(frozen=True, slots=True)
class Pool:
    num_available: int = 100_000

    def is_evictable(self, block_id: int) -> bool:
        return False

    def is_unshared(self, block_id: int) -> bool:
        return True


def no_prefix(sequence: SequenceView) -> Sequence[int]:
    return ()


def planned(*, cap: int, seats: int, num_decodes: int, method: str, configured: int) -> StepPlan:
    """A step of so many decodes with all their drafts, and of a prompt as long as can be."""
    num_drafts = num_speculative_tokens(method, configured)
    decodes = [
        Running(
            sequence_id=i,
            status=SequenceStatus.RUNNING_DECODE,
            num_known=65,
            num_computed=64,
            block_table=(i,),
            draft_token_ids=(7,) * num_drafts,
        )
        for i in range(num_decodes)
    ]
    prefill = Running(
        sequence_id=PREFILL_ID,
        status=SequenceStatus.RUNNING_PREFILL,
        num_known=10_000,
        num_prompt=10_000,
        num_computed=0,
        block_table=tuple(range(1000, 1157)),
    )
    config = SchedulingConfig()
    # The prompt stands in front: that must cost the decodes nothing.
    running = [prefill, *decodes] if num_decodes < seats else decodes
    return plan_step(
        running=running,
        lacking=[(index, 1) for index in range(len(running))],
        receiving=[],
        waiting=[],
        num_exporting=0,
        growth=lambda: growth_columns([]),
        pool=Pool(),
        match_prefix=no_prefix,
        limits=StepLimits(
            max_num_seqs=seats,
            max_num_batched_tokens=cap,
            block_size=BLOCK_SIZE,
            max_model_len=16_384,
            num_speculative_tokens=num_drafts,
        ),
        policy=PlanPolicy(
            reservation=make_reservation(config, block_size=BLOCK_SIZE, lookahead=num_drafts),
            victim_order=VICTIM_ORDERS[config.preemption_policy],
            config=config,
        ),
    )


@pytest.mark.covers("E01", "E02", "E03", "E04", "E05", "E09")
@pytest.mark.parametrize(
    ("cap", "num_decodes", "method", "configured", "left"),
    [
        pytest.param(8192, 100, "none", 0, 8092, id="E01"),
        pytest.param(8192, 100, "none", 1, 8092, id="E02"),
        pytest.param(8192, 100, "mtp", 1, 7992, id="E03"),
        pytest.param(8192, 100, "mtp", 4, 7692, id="E04"),
        pytest.param(8192, 0, "mtp", 4, 8192, id="E05"),
        pytest.param(2048, 300, "mtp", 5, 248, id="E09"),
    ],
)
def test_a_prompt_gets_what_the_decodes_leave(
    cap: int, num_decodes: int, method: str, configured: int, left: int
) -> None:
    plan = planned(
        cap=cap, seats=512, num_decodes=num_decodes, method=method, configured=configured
    )
    assert plan.chunks[PREFILL_ID].num_tokens == left
    assert plan.num_decode_tokens == num_decodes
    assert plan.num_draft_tokens == num_decodes * num_speculative_tokens(method, configured)
    assert plan.num_tokens == cap


@pytest.mark.parametrize(
    ("cap", "num_drafts", "left"),
    [pytest.param(2048, 5, 512, id="E06"), pytest.param(512, 1, 0, id="E07")],
)
def test_a_full_node_plans_every_decode_and_its_blocks(
    cap: int, num_drafts: int, left: int
) -> None:
    plan = planned(cap=cap, seats=256, num_decodes=256, method="mtp", configured=num_drafts)
    assert cap - plan.num_tokens == left
    assert plan.num_tokens == 256 * (1 + num_drafts)
    assert [chunk.num_new_blocks for chunk in plan.chunks.values()] == [1] * 256


def upstream_budget(cap: int, seats: int, per_seq: int) -> int:
    """FastDeploy #7438: every seat is reserved for, taken or not, and a floor lifts the rest."""
    return max(cap - seats * per_seq, min(cap, 512))


@pytest.mark.covers("B01", "C05", "S05")
def test_no_floor_lifts_the_budget() -> None:
    assert upstream_budget(2048, 512, 5) == 512
    assert upstream_budget(2048, 300, 6) + 300 * 6 == 2312
    plan = planned(cap=2048, seats=301, num_decodes=300, method="mtp", configured=5)
    assert plan.num_tokens == 2048


@pytest.mark.covers("C06")
def test_without_speculation_the_budget_is_whole() -> None:
    speculative_config = None
    upstream = 8192 - 256 * (1 + 1) if speculative_config is not None else 1
    assert max(upstream, min(8192, 512)) == 512
    plan = planned(cap=8192, seats=256, num_decodes=0, method="none", configured=0)
    assert plan.num_tokens == 8192


@pytest.mark.covers("B06", "C07")
def test_a_configuration_without_a_method_is_off() -> None:
    config = object()
    upstream_per_seq = 1 + 1 if config is not None else 1
    assert upstream_budget(8192, 256, upstream_per_seq) == 7680
    plan = planned(cap=8192, seats=256, num_decodes=100, method="none", configured=1)
    assert plan.chunks[PREFILL_ID].num_tokens == 8192 - 100


@pytest.mark.covers("B07", "C08", "E18", "S01")
def test_empty_seats_cost_nothing() -> None:
    assert upstream_budget(8192, 256, 5) == 6912
    plan = planned(cap=8192, seats=256, num_decodes=0, method="mtp", configured=4)
    assert plan.num_tokens == 8192
