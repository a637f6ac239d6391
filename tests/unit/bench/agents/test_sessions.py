"""What `bench.agents` asks is what its documentation says, and the same for the same seed."""

from __future__ import annotations

import statistics
from dataclasses import replace

from bench.agents.sessions import Shape, make_lone_prompts, make_sessions
from bench.agents.traced import make_traced
from simulator.trace_file import TraceRequest

SHAPE = Shape(num_sessions=40, num_systems=2)


def test_a_seed_names_one_load() -> None:
    assert make_sessions(SHAPE, 7) == make_sessions(SHAPE, 7)
    assert make_sessions(SHAPE, 7) != make_sessions(SHAPE, 8)


def test_sessions_of_a_kind_share_a_system_prompt_and_nothing_else() -> None:
    sessions = make_sessions(SHAPE, 1)
    assert len({session.name for session in sessions}) == SHAPE.num_sessions
    assert {len(session.system) for session in sessions} == {SHAPE.system_tokens}
    assert len({session.system for session in sessions}) == SHAPE.num_systems
    tasks = [turn.new_tokens for session in sessions for turn in session.turns]
    assert len(set(tasks)) == len(tasks)


def test_lengths_have_their_medians_and_a_bound() -> None:
    turns = [turn for session in make_sessions(SHAPE, 1) for turn in session.turns]
    new = [len(turn.new_tokens) for turn in turns]
    answers = [turn.num_answer_tokens for turn in turns]
    assert 0.8 < statistics.median(new) / SHAPE.new_tokens < 1.25
    assert 0.8 < statistics.median(answers) / SHAPE.answer_tokens < 1.25
    assert min(new + answers) >= 1
    widest = replace(SHAPE, new_sigma=3.0, answer_sigma=3.0)
    for session in make_sessions(widest, 1):
        said: list[int] = []
        for turn in session.turns:
            before = said[turn.parent] if turn.parent >= 0 else len(session.system)
            said.append(before + len(turn.new_tokens) + turn.num_answer_tokens)
            assert said[-1] <= widest.longest_prompt


def test_a_branch_goes_on_from_a_turn_before_the_last_one() -> None:
    sessions = make_sessions(replace(SHAPE, branch_share=0.5), 1)
    parents = [
        (index, turn.parent) for session in sessions for index, turn in enumerate(session.turns)
    ]
    assert all(-1 <= parent < index for index, parent in parents)
    branches = [index for index, parent in parents if parent != index - 1]
    possible = [index for index, _ in parents if index > 1]
    assert 0.35 < len(branches) / len(possible) < 0.65
    assert min(branches) == 2
    straight = make_sessions(replace(SHAPE, branch_share=0.0), 1)
    for session in straight:
        assert [turn.parent for turn in session.turns] == list(range(-1, SHAPE.num_turns - 1))


def test_lone_prompts_share_nothing_and_have_the_lengths_of_a_trace() -> None:
    clients = make_lone_prompts(20, 50, 1)
    assert clients == make_lone_prompts(20, 50, 1)
    turns = [turn for client in clients for turn in client.turns]
    assert len(turns) == 1000
    assert {turn.parent for turn in turns} == {-1}
    assert {client.system for client in clients} == {()}
    assert len({turn.new_tokens[:16] for turn in turns}) == 1000
    lengths = sorted(len(turn.new_tokens) for turn in turns)
    # The whole trace, divided by four: 5 % have 19 tokens or fewer, half 367, 5 % 1,829 or more.
    assert 10 < lengths[50] < 80
    assert 300 < lengths[500] < 440
    assert lengths[950] == lengths[-1] == 5 * 367
    assert 10 <= statistics.median(turn.num_answer_tokens for turn in turns) <= 16


def test_requests_of_a_trace_share_what_their_names_share() -> None:
    requests = [
        TraceRequest(10.0, 1400, 90, (1, 2, 3)),
        TraceRequest(10.5, 1536, 4, (1, 2, 4)),
        TraceRequest(11.0, 8 * 3001, 4, tuple(range(50))),
        TraceRequest(12.0, 80, 1, (2,)),
        TraceRequest(12.5, 88, 1),
        TraceRequest(13.0, 88, 1),
    ]
    sessions = make_traced(requests, 4)
    turns = [session.turns[0] for session in sessions]
    first, second, third, lone = (turn.new_tokens for turn in turns)
    assert [len(one) for one in (first, second, third, lone)] == [175, 192, 10, 11]
    assert first[:128] == second[:128]
    assert first[128:] != second[128:175]
    assert third == first[64:74]
    assert [turn.think_s for turn in turns] == [0.0, 4.0, 16.0, 20.0]
    assert [turn.num_answer_tokens for turn in turns] == [11, 1, 1, 1]
    assert len({session.name for session in sessions}) == 4
    assert make_traced(requests, 9)[4].turns[0].new_tokens != lone
    assert make_traced([], 9) == []
