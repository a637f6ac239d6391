"""Prefixes in host memory: the same answers with them as without, whatever is copied when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.engine.strategies import fixed, policies
from tests.property.engine.workload import Arrival, Run, check_answers
from tests.support.engine.build import Engine
from tests.support.engine.choices import METHODS
from tests.support.engine.tool_grammars import GRAMMARS
from tests.support.examples import everyday

LONGEST = 26


@st.composite
def crowded(draw: st.DrawFn) -> Engine:
    """An engine whose pool holds about two prompts, with host memory for one and more."""
    method = draw(st.sampled_from(METHODS))
    num_drafts = 0 if method == "none" else draw(st.integers(1, 3))
    seats = draw(st.integers(2, 4))
    block_size = draw(st.sampled_from([2, 4]))
    given = draw(policies())
    given["num_host_blocks"] = draw(st.sampled_from([1, 3, 8, 24]))
    given["keeps_prefixes"] = True
    given["preemption_mode"] = draw(st.sampled_from(["swap", "swap", "recompute"]))
    given["reservation_policy"] = draw(st.sampled_from(["none", given["reservation_policy"]]))
    return Engine(
        num_blocks=-(-LONGEST // block_size) + draw(st.integers(0, 6)),
        seats=seats,
        budget=draw(st.integers(seats * (1 + num_drafts), 40)),
        block_size=block_size,
        max_model_len=LONGEST,
        method=method,
        num_drafts=num_drafts,
        is_ahead=draw(st.booleans()),
        **given,
    )


@st.composite
def returning(draw: st.DrawFn) -> list[Arrival]:
    """Requests that come back to few beginnings, long after each other."""
    num_families = draw(st.integers(2, 4))
    arrival = st.builds(
        Arrival,
        at_step=st.integers(0, 60),
        family=st.integers(0, num_families - 1),
        length=st.integers(9, 17),
        max_tokens=st.integers(1, LONGEST - 17),
        seed=st.integers(0, 2),
        kind=st.sampled_from(("local", "local", "local", "remote", "exported")),
        delay=st.integers(0, 3),
        abort_after=st.none() | st.none() | st.integers(0, 8),
        priority=st.integers(-1, 1),
        grammar=st.sampled_from([None, None, *GRAMMARS]),
    )
    return sorted(draw(st.lists(arrival, min_size=12, max_size=24)), key=lambda a: a.at_step)


class FailingRun(Run):
    """Lets copies fail that are begun in some of the steps."""

    failing: frozenset[int] = frozenset()

    def _one_step(self) -> None:
        self.engine.runner.fail_next_copy |= self.num_steps in self.failing
        super()._one_step()


@pytest.mark.covers("F129")
def test_every_answer_is_right_with_prefixes_in_host_memory() -> None:
    happened: Counter[str] = Counter()

    @settings(fixed, max_examples=everyday(12, of=150))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        engine = data.draw(crowded())
        work = FailingRun(engine, data.draw(returning()))
        work.failing = frozenset(data.draw(st.sets(st.integers(0, 80), max_size=5)))
        check_answers(work, work.to_the_end())
        counters = engine.scheduler.statistics().counters
        is_late = engine.scheduler.kept_prefixes.is_late
        happened.update(
            {
                f"in, late: {is_late}": counters.num_prefix_blocks_in,
                f"found, late: {is_late}": counters.prefix_blocks_found["host"],
                "preempted": counters.num_preemptions,
                "swapped": counters.num_swapped_out,
                "fetching": counters.stops["fetching"],
                "accepted": counters.num_accepted,
            }
        )

    run()
    assert len(happened) == 8
    assert all(happened.values()), happened
