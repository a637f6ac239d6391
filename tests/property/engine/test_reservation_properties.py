"""Reservation policies on random sequences and events, beside exact arithmetic in fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.kv.blocks import blocks_for
from common.kv.token_budget import fit_max_model_len, tokens_per_seq
from common.nodes import Role
from common.settings.config import (
    Config,
    EngineConfig,
    HandoffConfig,
    ModelConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from engine.core.planning.decode_plan import new_blocks
from engine.core.policies.growth import growth_blocks
from engine.core.policies.reservation import RESERVATION_POLICIES
from engine.core.policies.reserve import Summed
from engine.core.policies.victims import (
    VICTIM_ORDERS,
    headroom_blocks,
    spare_recently_resumed,
)
from node.life.make_scheduler import max_chunk_tokens_of, speculation_of
from tests.support.engine.choices import FREE_METHODS
from tests.support.engine.planner_views import growth_columns
from tests.support.engine.policy_views import Decode, SummedReservation, View, summed
from tests.support.examples import everyday

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=everyday(80, of=200))

BLOCK_SIZES = st.sampled_from([1, 4, 16, 64])
PPM = st.integers(0, 1_000_000)


@st.composite
def views(draw: st.DrawFn) -> View:
    num_output = draw(st.integers(0, 6000))
    return View(
        num_known=draw(st.integers(1, 4000)) + num_output,
        num_output=num_output,
        max_new_tokens=draw(st.integers(0, 10_000)),
        num_held_blocks=draw(st.integers(0, 300)),
    )


@st.composite
def configs(draw: st.DrawFn, *names: str) -> SchedulingConfig:
    """Any legal configuration of the named policies."""
    initial = draw(st.integers(1, 1000)) / 1000
    first = draw(st.integers(0, 20))
    config = SchedulingConfig(
        reservation_policy=draw(st.sampled_from(names or tuple(POLICIES))),
        init_new_token_ratio=initial,
        min_new_token_ratio=draw(st.integers(1, round(initial * 1000))) / 1000,
        min_new_token_ratio_factor=draw(st.integers(1, 100)) / 100,
        new_token_ratio_decay_steps=draw(st.sampled_from([0, 1, 3, 7, 600])),
        clip_max_new_tokens=draw(st.sampled_from([1, 100, 4096])),
        retract_extra_tokens=draw(st.sampled_from([0, 1, 1024])),
        retract_decode_steps=draw(st.sampled_from([0, 20])),
        schedule_conservativeness=draw(st.sampled_from([0.3, 1.0, 2.0])),
        reserve_output_block_num_for_decode_when_schedule_new_prefill=first,
        reserve_min_output_block_num_for_decode_when_schedule_new_prefill=draw(
            st.integers(0, first)
        ),
        reserve_decay_output_block_num_for_decode_when_schedule_new_prefill=draw(
            st.sampled_from([0.0, 0.025, 0.3, 5.0])
        ),
    )
    assert config.problems() == []
    return config


POLICIES = tuple(
    name
    for name, made in RESERVATION_POLICIES.items()
    if isinstance(made(SchedulingConfig(reservation_policy=name), 16, 1), Summed)
)
"""Those whose sequences' demands are added up."""
EVENTS = st.lists(st.one_of(st.integers(1, 30), st.lists(views(), max_size=3)), max_size=8)
"""A number of decode steps, or the sequences that a preemption leaves."""


def after(reservation: SummedReservation, events: Sequence[Any]) -> SummedReservation:
    for event in events:
        if isinstance(event, list):
            reservation = reservation.after_preemption(event)
        else:
            for _ in range(event):
                reservation = reservation.after_decode_step()
    return reservation


def total(reservation: SummedReservation, running: Sequence[View]) -> int:
    return reservation.blocks(sum(map(reservation.demand, running)))


@pytest.mark.covers("S20")
@fixed
@given(views(), PPM, st.integers(1, 5000), st.integers(0, 8), BLOCK_SIZES)
def test_growth_is_the_exact_formula(
    view: View, ppm: int, clip: int, lookahead: int, block_size: int
) -> None:
    remaining = max(view.max_new_tokens - view.num_output, 0)
    share = Fraction(ppm, 1_000_000) * min(remaining, clip)
    expected = min(math.ceil(share) + lookahead, remaining)
    slots = Fraction(view.num_known + expected, block_size)
    assert growth_blocks(view, ppm, clip, lookahead, block_size) == max(
        math.ceil(slots) - view.num_held_blocks, 0
    )


@pytest.mark.covers("S23")
@fixed
@given(views(), PPM, PPM, st.integers(0, 8), BLOCK_SIZES)
def test_growth_rises_with_the_ratio(
    view: View, one: int, other: int, lookahead: int, block_size: int
) -> None:
    less, more = (
        growth_blocks(view, ppm, 4096, lookahead, block_size) for ppm in sorted((one, other))
    )
    assert 0 <= less <= more
    assert more <= max(
        blocks_for(view.num_known + max(view.max_new_tokens - view.num_output, 0), block_size)
        - view.num_held_blocks,
        0,
    )


@fixed
@given(configs(), EVENTS, st.lists(views(), max_size=6), BLOCK_SIZES, st.integers(0, 3))
def test_the_sum_over_columns_is_the_sum_over_sequences(
    config: SchedulingConfig,
    events: list[Any],
    seated: list[View],
    block_size: int,
    num_empty: int,
) -> None:
    reservation = after(summed(config, block_size=block_size, lookahead=2), events)
    empty = [View(max_new_tokens=0)] * num_empty
    found = reservation.total_demand(growth_columns([*seated, *empty]))
    assert type(found) is int
    assert found == sum(map(reservation.demand, seated))


@pytest.mark.covers("S19", "S23")
@fixed
@given(configs(), EVENTS, st.lists(views(), max_size=6), st.data())
def test_more_running_sequences_never_need_less_and_their_order_does_not_matter(
    config: SchedulingConfig, events: list[Any], running: list[View], data: st.DataObject
) -> None:
    block_size = data.draw(BLOCK_SIZES)
    reservation = after(summed(config, block_size=block_size, lookahead=2), events)
    shuffled = data.draw(st.permutations(running))
    assert total(reservation, shuffled) == total(reservation, running)
    grown = 0
    for count in range(len(shuffled) + 1):
        demand = total(reservation, shuffled[:count])
        assert type(demand) is int
        assert demand >= grown >= 0
        grown = demand


@pytest.mark.covers("B13", "S27", "S28")
@fixed
@given(configs("token_ratio", "global_ratio"), EVENTS, st.lists(views(), max_size=3))
def test_the_ratio_keeps_its_bounds_and_no_preemption_lowers_it(
    config: SchedulingConfig, events: list[Any], left: list[View]
) -> None:
    start = summed(config, block_size=16, lookahead=2)
    lowest = (
        start.ratio * config.min_new_token_ratio_factor
        if config.reservation_policy == "global_ratio"
        else config.min_new_token_ratio
    )
    reservation = start
    for event in events:
        reservation = after(reservation, [event])
        assert lowest - 1e-6 <= reservation.ratio <= start.ratio <= 1
    assert lowest - 1e-6 <= reservation.after_decode_step().ratio <= reservation.ratio
    preempted = reservation.after_preemption(left)
    assert reservation.ratio <= preempted.ratio <= start.ratio
    if not left:
        assert preempted.ratio == start.ratio


@pytest.mark.covers("S32")
@fixed
@given(configs(), EVENTS)
def test_an_idle_node_is_as_new_and_same_events_give_the_same_value(
    config: SchedulingConfig, events: list[Any]
) -> None:
    start = summed(config, block_size=16, lookahead=2)
    lived = after(start, events)
    assert lived.when_idle() == start
    again = after(summed(config, block_size=16, lookahead=2), events)
    assert (lived, hash(lived)) == (again, hash(again))


@pytest.mark.covers("S31")
@fixed
@given(configs("token_ratio"), st.integers(0, 2000))
def test_the_ratio_falls_in_exactly_as_many_steps_as_configured(
    config: SchedulingConfig, num_steps: int
) -> None:
    reservation = after(summed(config, block_size=16, lookahead=0), [num_steps])
    first, last = (
        Fraction(round(ratio * 1_000_000), 1_000_000)
        for ratio in (config.init_new_token_ratio, config.min_new_token_ratio)
    )
    steps = config.new_token_ratio_decay_steps
    exact = max(first - (first - last) * num_steps / steps, last) if steps else first
    # Rounded up to a millionth, once, however many steps there were.
    assert (
        0
        <= Fraction(round(reservation.ratio * 1_000_000), 1_000_000) - exact
        < Fraction(1, 1_000_000)
    )


@pytest.mark.covers("S35")
@fixed
@given(st.lists(views(), max_size=6), st.integers(0, 40), st.integers(1, 9), BLOCK_SIZES)
def test_headroom_rises_with_steps_and_drafts_and_is_no_more_than_can_be_used(
    left: list[View], steps: int, per_seq: int, block_size: int
) -> None:
    def headroom(steps: int, per_seq: int) -> int:
        return headroom_blocks(
            left, retract_decode_steps=steps, tokens_per_seq=per_seq, block_size=block_size
        )

    assert 0 <= headroom(steps, per_seq) <= headroom(steps + 1, per_seq)
    assert headroom(steps, per_seq) <= headroom(steps, per_seq + 1)
    remaining = sum(max(view.max_new_tokens - view.num_output, 0) for view in left)
    assert headroom(steps, per_seq) <= blocks_for(remaining, block_size)
    assert headroom(steps, per_seq) <= blocks_for(steps * per_seq * len(left), block_size)


@pytest.mark.covers("S33", "S37")
@fixed
@given(
    st.lists(
        st.builds(
            Decode,
            name=st.just(""),
            num_output=st.integers(0, 2),
            num_prompt=st.integers(1, 3),
            priority=st.integers(-1, 1),
            arrival=st.integers(0, 3),
            num_output_since_resume=st.none() | st.integers(0, 4),
        ),
        max_size=7,
    ),
    st.sampled_from(sorted(VICTIM_ORDERS)),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_orders_do_not_depend_on_the_order_of_the_arguments(
    candidates: list[Decode], order: str, min_progress: int, random: Any
) -> None:
    candidates = [replace(view, sequence_id=i) for i, view in enumerate(candidates)]
    shuffled = list(candidates)
    random.shuffle(shuffled)
    ordered = VICTIM_ORDERS[order](candidates)
    assert ordered == VICTIM_ORDERS[order](shuffled)
    assert sorted(view.sequence_id for view in ordered) == list(range(len(candidates)))
    spared = spare_recently_resumed(ordered, min_progress)
    fresh = [
        view.num_output_since_resume is not None and view.num_output_since_resume < min_progress
        for view in spared
    ]
    assert fresh == sorted(fresh)
    for is_fresh in (False, True):
        group = [view for view, recent in zip(spared, fresh, strict=True) if recent is is_fresh]
        assert group == [view for view in ordered if view in group]


@pytest.mark.covers("E30", "S18")
@fixed
@given(
    st.integers(0, 5000), st.integers(0, 500), st.integers(0, 8), st.integers(0, 90), BLOCK_SIZES
)
def test_the_new_blocks_are_the_fewest_that_hold_the_step(
    num_computed: int, num_tokens: int, lookahead: int, num_held: int, block_size: int
) -> None:
    added = new_blocks(num_computed, num_tokens, lookahead, num_held, block_size)
    slots = num_computed + num_tokens + lookahead
    assert added >= 0
    assert (num_held + added) * block_size >= slots
    assert added == 0 or (num_held + added - 1) * block_size < slots


@st.composite
def nodes(draw: st.DrawFn) -> Config:
    return Config(
        role=draw(st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED])),
        model=ModelConfig(model="m"),
        engine=EngineConfig(
            max_num_seqs=draw(st.integers(1, 64)),
            max_num_batched_tokens=draw(st.integers(1, 600)),
        ),
        handoff=HandoffConfig(local_prefill_threshold=draw(st.sampled_from([0, 64]))),
        scheduling=SchedulingConfig(chunk_granularity=draw(st.sampled_from([1, 16, 64]))),
        speculation=SpeculationConfig(
            speculative_method=draw(st.sampled_from(FREE_METHODS)),
            num_speculative_tokens=draw(st.integers(0, 8)),
        ),
    )


@pytest.mark.covers("S11", "S52", "S53")
@fixed
@given(nodes(), st.data())
def test_a_legal_node_always_gets_on(config: Config, data: st.DataObject) -> None:
    engine, speculation = config.engine, speculation_of(config)
    per_seq = tokens_per_seq(speculation.speculative_method, speculation.num_speculative_tokens)
    most, granularity = max_chunk_tokens_of(config), config.scheduling.chunk_granularity
    decodes = config.role is not Role.PREFILL
    num_decoding = data.draw(st.integers(0, engine.max_num_seqs)) if decodes else 0
    decode_tokens = num_decoding * per_seq
    if config.problems():
        full = engine.max_num_seqs * per_seq if decodes else 0
        beside = (engine.max_num_seqs - 1) * per_seq if decodes else 0
        cap = engine.max_num_batched_tokens
        assert full > cap or beside + granularity > cap
        return
    # All decodes with all their drafts fit, and beside them a chunk where there is a seat for it.
    assert decode_tokens <= most <= engine.max_num_batched_tokens
    if num_decoding < engine.max_num_seqs:
        assert most - decode_tokens >= granularity


@pytest.mark.covers("S54")
@fixed
@given(st.integers(0, 400), st.integers(0, 40), BLOCK_SIZES, st.integers(1, 20))
def test_the_longest_sequence_and_one_more_step_of_it_fit_the_pool(
    configured: int, num_blocks: int, block_size: int, per_seq: int
) -> None:
    def fits(length: int) -> bool:
        step = blocks_for(per_seq, block_size)
        return blocks_for(length, block_size) + step <= num_blocks

    try:
        length = fit_max_model_len(
            configured=configured,
            model_limit=500,
            num_blocks=num_blocks,
            block_size=block_size,
            tokens_per_seq=per_seq,
        )
    except ConfigError:
        assert not fits(configured or 1)
        return
    assert fits(length)
    if configured:
        assert length == configured
    else:
        assert length == 500 or not fits(length + 1)
