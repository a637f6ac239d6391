"""Requests whose grammar is being compiled: they wait for it, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import InvalidRequest, Overloaded, PdserveError
from common.ids import Incarnation
from engine.core.sequences.status import SequenceStatus
from node.flow.messages import AbortAttempt, Compiled, Drain, Message, RouterGone, Submit
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import DECODE, PREFILL, ROUTER, World, right_answer
from tests.support.engine.tool_grammars import GRAMMARS

DEADLINE_S = 5.0
REFUSED = InvalidRequest("the JSON schema cannot be followed: too much work")


class CompilingWorld(World):
    """On `compiling` nodes no grammar is compiled until the test says so."""

    def __init__(self, *compiling: Incarnation, decode: NodeSize | None = None) -> None:
        size = NodeSize(budget=8, seats=2)
        super().__init__(threshold=4, prefill=size, decode=decode or size)
        self.compiling = set(compiling)
        self.held: list[tuple[Incarnation, Submit]] = []

    def to_the_node(self, node: Incarnation, message: Message) -> None:
        """A call with a grammar arrives, and its compilation begins."""
        is_held = (
            node in self.compiling
            and isinstance(message, Submit)
            and message.request.sampling.grammar is not None
        )
        if is_held:
            assert isinstance(message, Submit)
            message = replace(message, is_compiling=True)
            self.held.append((node, message))
        super().to_the_node(node, message)

    def compile(self, error: PdserveError | None = None) -> None:
        """All compilations end."""
        held, self.held = self.held, []
        for node, submit in held:
            compiled = Compiled(submit.request.id, submit.reply_to, error)
            self.nodes[node].inbox.put(compiled)


def ask(world: World, length: int = 20, **given: object) -> Asked:
    return world.ask(
        length, max_tokens=12, deadline_s=DEADLINE_S, grammar=GRAMMARS[0], temperature=1.0, **given
    )


def held_for_a_reservation() -> tuple[CompilingWorld, Asked]:
    world = CompilingWorld(DECODE)
    return world, ask(world)


def held_before_its_prompt() -> tuple[CompilingWorld, Asked]:
    world = CompilingWorld(PREFILL)
    return world, ask(world)


def held_before_a_local_prompt() -> tuple[CompilingWorld, Asked]:
    world = CompilingWorld(DECODE)
    return world, ask(world, 3)


def held_before_it_continues() -> tuple[CompilingWorld, Asked]:
    world = CompilingWorld(DECODE)
    right = right_answer(ask(World()).request)
    return world, ask(world, output_token_ids=tuple(right[:2]))


Reach = Callable[[], tuple[CompilingWorld, Asked]]
each_place = pytest.mark.parametrize(
    "reach",
    [
        held_for_a_reservation,
        held_before_its_prompt,
        held_before_a_local_prompt,
        held_before_it_continues,
    ],
)


def reached(reach: Reach) -> tuple[CompilingWorld, Asked]:
    """A request that waits for its grammar, and for nothing else."""
    world, asked = reach()
    world.settle()
    ((node, _),) = world.held
    attempt = world.nodes[node].flow.attempts.get(asked.request.id)
    assert attempt is not None
    assert attempt.sequence.status is SequenceStatus.WAITING
    assert attempt.sequence not in world.nodes[node].scheduler.waiting
    assert not attempt.sequence.block_table
    assert world.nodes[node].flow.snapshot().load.num_waiting == 1
    return world, asked


def check_ended(world: CompilingWorld, asked: Asked, outcome: str) -> None:
    """It has ended, also when its compilation ends later."""
    world.settle()
    assert asked.outcomes == [outcome]
    world.compile()
    world.settle()
    world.check_closed()


@each_place
def test_others_go_on_meanwhile_and_it_is_answered_afterwards(reach: Reach) -> None:
    world, asked = reached(reach)
    others = [
        world.ask(length, max_tokens=12, ignore_eos=True, name=f"other{length}", may_wait=True)
        for length in (3, 9, 21)
    ]
    world.settle()
    assert [other.outcomes for other in others] == [["finished"]] * 3
    assert not asked.is_done
    world.compile()
    world.settle()
    known = asked.request.output_token_ids
    asked.tokens |= dict(enumerate(known))
    assert asked.answer() == right_answer(replace(asked.request, output_token_ids=()))
    asked.outcomes = ["finished"]  # of a continued answer this router has not seen the first tokens
    world.check_closed()


@pytest.mark.covers("G12")
@each_place
def test_a_grammar_that_does_not_compile_ends_its_request(reach: Reach) -> None:
    world, asked = reached(reach)
    other = world.ask(9, max_tokens=12, ignore_eos=True, name="other")
    world.step()
    world.compile(REFUSED)
    world.settle()
    assert asked.outcomes[0].split(": ")[1] == "invalid_request"
    assert other.outcomes == ["finished"]
    world.check_closed()


@each_place
def test_an_abort_releases_it_at_once(reach: Reach) -> None:
    world, asked = reached(reach)
    ((node, _),) = world.held
    attempt = world.nodes[node].flow.attempts.get(asked.request.id)
    assert attempt is not None
    world.router.abort(asked)
    check_ended(world, asked, "aborted")
    assert attempt.sequence.status is SequenceStatus.FINISHED


@each_place
def test_a_lost_router_releases_it(reach: Reach) -> None:
    world, asked = reached(reach)
    for node in (PREFILL, DECODE):
        world.to_the_node(node, RouterGone(ROUTER))
    asked.outcomes = ["the router is gone"]
    check_ended(world, asked, "the router is gone")


@each_place
def test_a_passed_deadline_releases_it(reach: Reach) -> None:
    world, asked = reached(reach)
    world.clock.advance(DEADLINE_S)  # the connectors have deadlines of their own
    world.step(frames=False)
    world.settle()
    check_ended(world, asked, asked.outcomes[0])
    assert asked.outcomes[0].endswith("deadline_exceeded")


@each_place
def test_a_node_that_stops_says_so(reach: Reach) -> None:
    world, asked = reached(reach)
    ((node, _),) = world.held
    world.stop(world.nodes[node])
    world.settle()
    check_ended(world, asked, asked.outcomes[0])
    assert asked.outcomes[0].endswith("node_lost")


@each_place
def test_a_node_that_drains_hands_it_over_or_lets_it_finish(reach: Reach) -> None:
    world, asked = reached(reach)
    ((node, _),) = world.held
    world.nodes[node].inbox.put(Drain(1.0))
    world.settle()
    if not asked.is_done:  # it was accepted before
        assert world.nodes[node].num_drained == 0
        world.advance(1.0)
        world.settle()
    check_ended(world, asked, asked.outcomes[0])
    assert asked.outcomes[0].endswith("draining")
    assert world.nodes[node].num_drained == 1


def test_a_prompt_that_waits_for_its_grammar_keeps_its_reservation() -> None:
    """Its transfer is open, which renews the lease of the landing."""
    world, asked = reached(held_before_its_prompt)
    assert len(world.p.connector.transfers) == 1
    assert len(world.d.connector.landings) == 1
    world.compile()
    world.settle()
    assert asked.outcomes == ["finished"]


def test_a_transfer_that_fails_meanwhile_ends_it() -> None:
    world, asked = reached(held_before_its_prompt)
    world.to_the_node(DECODE, AbortAttempt(ROUTER, (asked.request.id,)))
    world.settle()
    if not asked.is_done:
        world.router.abort(asked)
    world.settle()
    world.compile()
    world.settle()
    world.check_closed()


def test_one_that_asked_twice_is_scheduled_once() -> None:
    world = CompilingWorld(DECODE)
    asked = ask(world, may_wait=True)
    world.router.send_reserve(asked)
    world.step()
    first, again = world.held
    world.held = [again]
    world.compile()
    world.step()
    assert not world.d.scheduler.receiving, "that tells of the call that asked again"
    world.held = [first]
    world.compile()
    world.settle()
    world.check_closed()
    assert asked.outcomes == ["finished"]


def test_a_reservation_that_may_not_wait_is_refused_when_there_is_no_room_any_more() -> None:
    world = CompilingWorld(DECODE, decode=NodeSize(budget=8, seats=1))
    asked = ask(world)
    world.step()
    other = world.ask(9, max_tokens=12, ignore_eos=True, name="other")
    world.step_until(lambda: other.has_started)
    world.compile()
    world.step()
    world.settle()
    assert asked.outcomes == ["refused: overloaded"]
    assert other.outcomes == ["finished"]
    world.check_closed()


@pytest.mark.parametrize("why", [None, Overloaded("256 grammars wait to be compiled")])
def test_one_refused_behind_its_grammar_may_be_asked_again_to_wait(
    why: PdserveError | None,
) -> None:
    """Every node was full, so its router asks one of them to queue it, in the same attempt."""
    world = CompilingWorld(DECODE, decode=NodeSize(budget=8, seats=1))
    asked = ask(world)
    world.step()
    other = world.ask(9, max_tokens=12, ignore_eos=True, name="other")
    world.step_until(lambda: other.has_started)
    world.compile(why)
    world.step_until(lambda: asked.is_done)
    assert asked.outcomes == ["refused: overloaded"]
    asked.outcomes, asked.may_wait = [], True
    world.router.send_reserve(asked)
    world.step()
    world.compile()
    world.settle()
    assert asked.answer() == right_answer(asked.request)
    world.check_closed()


def test_those_that_wait_for_a_grammar_fill_the_queue() -> None:
    world = CompilingWorld(DECODE, decode=NodeSize(max_queued=2))
    asked = [ask(world, name=f"r{number}", may_wait=True) for number in range(3)]
    world.settle()
    assert [one.outcomes for one in asked] == [[], [], ["refused: overloaded"]]
    world.compile()
    world.settle()
    world.check_closed()
