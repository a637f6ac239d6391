"""What of a configuration reaches a node's scheduler and its runner, by role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.nodes import Role
from common.settings.config import (
    Config,
    EngineConfig,
    HandoffConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from engine.core.sequences.sequence import Sequence
from node.life.make_scheduler import (
    host_space_of,
    make_scheduler,
    max_chunk_tokens_of,
    plans_ahead,
    speculation_of,
)
from tests.support.engine.build import make_request
from tests.support.engine.hash_runner import HashRunner


def config(
    role: Role, method: str = "none", *, threshold: int = 64, **scheduling: object
) -> Config:
    return Config(
        role=role,
        engine=EngineConfig(max_num_seqs=3, max_num_batched_tokens=100, block_size=8),
        speculation=SpeculationConfig(speculative_method=method, num_speculative_tokens=2),
        scheduling=SchedulingConfig(**scheduling),  # type: ignore[arg-type]
        handoff=HandoffConfig(local_prefill_threshold=threshold),
    )


@pytest.mark.parametrize(
    ("role", "method", "wanted", "num_drafts"),
    [
        (Role.DECODE, "none", "none", 0),
        (Role.DECODE, "ngram", "ngram", 2),
        (Role.MIXED, "suffix", "suffix", 2),
        (Role.MIXED, "mtp", "mtp", 2),
        (Role.PREFILL, "ngram", "ngram", 2),
        (Role.PREFILL, "mtp", "mtp", 2),
    ],
)
def test_a_node_drafts_as_is_configured(
    role: Role, method: str, wanted: str, num_drafts: int
) -> None:
    given = config(role, method, chunk_granularity=4)
    assert speculation_of(given).speculative_method == wanted
    model = HashRunner(num_blocks=10, block_size=8)
    scheduler = make_scheduler(given, model)
    limits = scheduler.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.block_size) == (3, 100, 8)
    assert (limits.max_model_len, limits.chunk_granularity) == (80, 4)
    assert (limits.num_speculative_tokens, limits.tokens_per_seq) == (num_drafts, 1 + num_drafts)
    assert limits.pairs_per_token == model.pairs_per_token > 0
    assert scheduler.statistics().method == wanted
    assert scheduler.pool.num_blocks == 10


@pytest.mark.parametrize(("method", "wanted"), [("ngram", "none"), ("mtp", "mtp")])
def test_a_node_that_cannot_decode_drafts_only_what_nobody_else_can(
    method: str, wanted: str
) -> None:
    given = config(Role.PREFILL, method)
    engine = replace(given.engine, max_num_batched_tokens=8)  # 3 sequences of 3 tokens
    assert speculation_of(replace(given, engine=engine)).speculative_method == wanted


@pytest.mark.covers("S11")
@pytest.mark.parametrize(
    ("role", "method", "threshold", "granularity", "wanted"),
    [
        (Role.PREFILL, "mtp", 0, 1, 100),
        (Role.MIXED, "mtp", 0, 1, 100),
        (Role.DECODE, "mtp", 64, 1, 100),
        (Role.DECODE, "mtp", 1, 1, 100),
        (Role.DECODE, "none", 0, 1, 3),
        (Role.DECODE, "none", 0, 4, 6),
        (Role.DECODE, "ngram", 0, 1, 9),
        (Role.DECODE, "suffix", 0, 2, 9),
        (Role.DECODE, "mtp", 0, 8, 14),
    ],
)
def test_the_scheduler_plans_no_more_than_the_largest_step(
    role: Role, method: str, threshold: int, granularity: int, wanted: int
) -> None:
    given = config(role, method, threshold=threshold, chunk_granularity=granularity)
    assert max_chunk_tokens_of(given) == wanted
    scheduler = make_scheduler(given, HashRunner(num_blocks=10, block_size=8))
    assert scheduler.limits.max_num_batched_tokens == wanted


@pytest.mark.parametrize(
    ("role", "mode", "kept", "wanted"),
    [
        (Role.DECODE, "recompute", 0, 0),
        (Role.DECODE, "swap", 0, 5 << 20),
        (Role.MIXED, "swap", 0, 5 << 20),
        (Role.PREFILL, "swap", 0, 0),
        (Role.DECODE, "recompute", 3 << 20, 3 << 20),
        (Role.DECODE, "swap", 3 << 20, 8 << 20),
        (Role.PREFILL, "swap", 3 << 20, 3 << 20),
    ],
)
def test_host_memory_is_taken_where_blocks_are_swapped_or_kept(
    role: Role, mode: str, kept: int, wanted: int
) -> None:
    given = config(role, preemption_mode=mode, swap_space=5 << 20)
    given = replace(given, engine=replace(given.engine, prefix_host_memory=kept))
    assert host_space_of(given) == wanted


def test_host_blocks_count_only_when_blocks_are_swapped_or_kept() -> None:
    model = HashRunner(num_blocks=10, block_size=8, num_host_blocks=6)
    for mode, kept, count in (("recompute", 0, 0), ("swap", 0, 6), ("recompute", 1, 6)):
        given = config(Role.DECODE, preemption_mode=mode)
        given = replace(given, engine=replace(given.engine, prefix_host_memory=kept))
        scheduler = make_scheduler(given, model)
        assert scheduler.host_pool.num_blocks == count
        assert scheduler.kept_prefixes.is_enabled == (kept > 0)


@pytest.mark.covers("S03")
def test_an_unused_number_of_drafts_is_not_read() -> None:
    # A method that is off charges one token, whatever the number says.
    given = config(Role.DECODE)
    given = replace(given, speculation=replace(given.speculation, num_speculative_tokens=50))
    assert make_scheduler(given, HashRunner(num_blocks=4)).limits.tokens_per_seq == 1


@pytest.mark.parametrize(
    ("chosen", "on_a_device", "on_a_cpu"),
    [("auto", True, False), ("on", True, True), ("off", False, False)],
)
def test_steps_are_planned_ahead_where_they_run_on_a_device(
    chosen: str, on_a_device: bool, on_a_cpu: bool
) -> None:
    given = config(Role.DECODE, async_scheduling=chosen)
    model = HashRunner(num_blocks=10, block_size=8)
    for needs_staging, wanted in ((True, on_a_device), (False, on_a_cpu)):
        model.needs_staging = needs_staging
        assert plans_ahead(given, model) is wanted


@pytest.mark.parametrize("goes_on", ["", "early"])
@pytest.mark.parametrize("chosen", ["auto", "on", "off"])
def test_steps_begin_early_where_the_runner_can_and_steps_are_planned_ahead(
    chosen: str, goes_on: str
) -> None:
    model = HashRunner(num_blocks=10, block_size=8)
    model.goes_on = goes_on
    scheduler = make_scheduler(config(Role.DECODE, async_scheduling=chosen), model)
    request = make_request(5, max_tokens=8, ignore_eos=True)
    scheduler.add(Sequence(1, request))
    for _ in range(6):
        step = scheduler.plan()
        scheduler.apply(step, model.execute(step.batch))
    has_begun = scheduler.statistics().counters.plans_ahead["begun"] > 0
    assert has_begun is (goes_on != "" and chosen != "off")
