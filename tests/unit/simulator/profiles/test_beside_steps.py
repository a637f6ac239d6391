"""What nodes take beside their models: differences and ratios of what clients saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.measured_profile import (
    Beside,
    ChunkTime,
    DecodeTime,
    FirstTokenTime,
    SecondTokenTime,
    StreamedTime,
    TransferTime,
)
from simulator.profile import device_of
from simulator.profiles.beside_steps import NOTHING_BESIDE, BesideSteps
from simulator.profiles.measured_steps import MeasuredSteps
from simulator.profiles.shared_cores import NO_SLOWDOWN
from tools.generate_profiles import FILES, profile_of

STREAMED = (
    StreamedTime(rows=8, context=100, beside="", step_s=0.021),
    StreamedTime(rows=1, context=500, beside="", step_s=0.012),
    StreamedTime(rows=1, context=600, beside="prompts", step_s=0.0132),
    StreamedTime(rows=1, context=112, beside="answers", step_s=0.0144),
)


def first_token(
    tokens: int, compute_s: float, *, nodes: int = 2, beside: Beside = ""
) -> FirstTokenTime:
    """6 ms of a request are beside the computation of its prompt."""
    return FirstTokenTime(
        tokens=tokens, beside=beside, nodes=nodes, seconds=compute_s + 0.006, compute_s=compute_s
    )


FIRST = (first_token(512, 1.3 * 0.514, beside="answers"), first_token(512, 0.514))
WHOLE = replace(
    profile_of(*FILES["8b_h100"]),
    decodes=tuple(
        DecodeTime(rows=n, context=c, step_s=0.009 + 0.001 * n) for n in (1, 8) for c in (1, 900)
    ),
    chunks=tuple(ChunkTime(tokens=n, context=0, step_s=1e-3 * n) for n in (64, 256)),
)  # fmt: skip


def beside(streamed: tuple[StreamedTime, ...], first: tuple[FirstTokenTime, ...]) -> BesideSteps:
    return device_of(replace(WHOLE, streamed=streamed, first_tokens=first)).beside


def test_it_is_what_clients_saw_less_what_the_model_takes() -> None:
    """A prompt of 512 is computed in two chunks, as none of 512 was measured."""
    found = beside(STREAMED, FIRST)
    assert found.turn_s == pytest.approx(0.002)
    assert found.row_s == pytest.approx((0.004 - 0.002) / 7)
    assert found.request_s == pytest.approx(0.006)
    assert found.push_s == pytest.approx(0.0)
    assert found.prompt_factor == 1.0, "one length does not tell a prompt and its tokens apart"
    assert found.slowdowns == pytest.approx((1.2, 1.1, 1.3, 1.0))


def test_prompts_of_two_lengths_tell_apart_what_a_prompt_and_what_its_tokens_take() -> None:
    """The longer one shows what the steps of prompts take in a cluster."""
    small, large = (first_token(n, 0.014 + 0.002 + 1.1e-3 * n) for n in (128, 512))
    beside_others = first_token(512, 1.2 * large.compute_s, beside="answers")
    found = beside(STREAMED, (large, small, beside_others))
    assert found.prompt_factor == pytest.approx(1.1)
    assert (found.request_s, found.push_s) == pytest.approx((0.006, 0.014))
    assert found.slowdowns.prompts_beside_answers == pytest.approx(1.2)
    profile = replace(WHOLE, streamed=STREAMED, first_tokens=(large, small))
    steps = MeasuredSteps(profile, 0.0), MeasuredSteps(WHOLE, 0.0)
    took_s = [one.seconds(0, 0, 200, 200 * 201 // 2) for one in steps]
    assert took_s[0] == pytest.approx(1.1 * took_s[1])
    assert steps[0].seconds(4, 400) == steps[1].seconds(4, 400), "decodes are what they were"


def test_a_prompt_that_no_other_node_computes_has_no_pushes_and_draws_a_token() -> None:
    handed_over = tuple(first_token(n, 0.014 + 0.003 + 0.002 + 1.1e-3 * n) for n in (128, 512))
    local = first_token(64, 0.003 + 0.002 + 1.1e-3 * 64, nodes=1)
    found = beside(STREAMED, (local, *handed_over))
    assert (found.request_s, found.push_s) == pytest.approx((0.006 + 0.003, 0.014))
    assert found.prompt_factor == pytest.approx(1.1), "the local one is not part of it"
    found = beside(STREAMED, (first_token(64, 0.4, nodes=1), *handed_over))
    assert (found.request_s, found.push_s) == pytest.approx((0.023, 0.0)), "noise is no push"
    found = beside(STREAMED, (first_token(64, 0.05, nodes=1), *handed_over))
    assert (found.request_s, found.push_s) == pytest.approx((0.006, 0.017))


def test_a_prompt_beside_another_is_compared_with_one_that_as_many_nodes_served() -> None:
    """The shortest one of those that one node serves shows what drawing a token takes."""
    handed_over = tuple(first_token(n, 0.014 + 0.002 + 1.1e-3 * n) for n in (128, 512))
    local = first_token(64, 0.003 + 0.002 + 1.1e-3 * 64, nodes=1)
    whole, pair = first_token(512, 0.5, nodes=1), first_token(512, 0.7, nodes=1, beside="prompts")
    found = beside(STREAMED, (pair, whole, local, *handed_over))
    assert found.slowdowns == pytest.approx((1.2, 1.1, 1.0, 1.4))
    assert (found.request_s, found.push_s) == pytest.approx((0.006 + 0.003, 0.011))
    assert beside(STREAMED, (pair, local, *handed_over)).slowdowns.prompts_beside_prompts == 1.0


def test_a_machine_that_was_slower_when_it_served_is_so_in_all() -> None:
    """Otherwise all of it would count as what a prompt takes, however short it is."""
    times = tuple(first_token(n, 0.002 + 1.5 * (0.014 + 1e-3 * n)) for n in (128, 512))
    found = beside(STREAMED, times)
    assert (found.request_s, found.push_s, found.prompt_factor) == pytest.approx(
        (0.006, 0.021, 1.5)
    )


def test_answers_that_clients_saw_sooner_than_steps_take_were_of_a_quicker_machine() -> None:
    """Else its steps would be too slow, with nothing beside them, in every plan."""
    streamed = tuple(replace(one, step_s=one.step_s / 2) for one in STREAMED)
    measured = replace(WHOLE, streamed=streamed, first_tokens=FIRST)
    steps = MeasuredSteps(measured, 0.0)
    found = steps.beside
    assert found.answer_factor == pytest.approx(0.6), "an answer took 6 ms and its step 10"
    assert found.turn_s == pytest.approx(0.0)
    assert found.slowdowns[:2] == pytest.approx((1.2, 1.1))
    for one in streamed[:2]:
        took_s = steps.ends_of_decodes(0.0, one.rows, one.rows * one.context, 1)
        assert took_s == pytest.approx([one.step_s])
    assert steps.seconds(0, 0, 200, 200 * 201 // 2) == pytest.approx(0.2), "chunks as they were"
    assert beside(STREAMED, FIRST).answer_factor == 1.0, "what is more is beside steps"


def test_a_second_token_shows_what_a_handoff_takes_beside_its_bytes() -> None:
    """A quarter of the KV moves after the prompt's last step."""
    num_bytes = WHOLE.model.kv_bytes_per_token * 1024
    transfers = (
        TransferTime(transport="shm", num_bytes=num_bytes, seconds=0.005),
        TransferTime(transport="shm", num_bytes=2 * num_bytes, seconds=0.009),
        TransferTime(transport="zmq", num_bytes=num_bytes, seconds=0.5),
    )
    second = (SecondTokenTime(tokens=1024, seconds=0.020),)
    measured = replace(WHOLE, transfers=transfers, streamed=STREAMED, second_tokens=second)
    found = device_of(measured, "shm")
    assert found.beside.handoff_s == pytest.approx(0.020 - 0.012 - 0.002)
    assert found.network_latency_s == pytest.approx(0.001 + found.beside.handoff_s)
    elsewhere = device_of(measured, "zmq").beside.handoff_s
    assert elsewhere == found.beside.handoff_s, "measured on one machine"
    without = replace(measured, transfers=transfers[2:])
    assert device_of(without).beside.handoff_s == pytest.approx(0.008)


def test_a_handoff_that_was_quicker_than_bytes_of_one_process_takes_what_clients_saw() -> None:
    num_bytes = WHOLE.model.kv_bytes_per_token * 1024
    transfers = tuple(
        TransferTime(transport="shm", num_bytes=n * num_bytes, seconds=0.020 + 0.004 * n)
        for n in (1, 2)
    )
    second = (SecondTokenTime(tokens=1024, seconds=0.010 + 0.002 + 0.001 + 0.003),)
    measured = replace(WHOLE, transfers=transfers, streamed=STREAMED, second_tokens=second)
    assert device_of(measured, "shm").network_latency_s == pytest.approx(0.003)
    quicker = replace(measured, second_tokens=(SecondTokenTime(tokens=1024, seconds=0.001),))
    assert device_of(quicker, "shm").network_latency_s == 0.0


def test_it_is_part_of_every_step() -> None:
    profile = replace(WHOLE, streamed=STREAMED, first_tokens=FIRST)
    found, model = MeasuredSteps(profile, 0.0), MeasuredSteps(WHOLE, 0.0)
    for rows, beside_s in ((1, 0.002), (8, 0.004)):
        took_s = [
            steps.ends_of_decodes(1.0, rows, 300 * rows, 3)[-1] - 1.0 for steps in (found, model)
        ]
        assert took_s[0] - took_s[1] == pytest.approx(3 * beside_s)
    assert found.beside.of_step(0) == found.beside.turn_s, "a step of prompts alone"


def test_nothing_measured_is_nothing_beside_and_noise_is_none() -> None:
    assert beside((), ()) == NOTHING_BESIDE
    quicker = tuple(replace(one, step_s=0.4 * (0.009 + 0.001 * one.rows)) for one in STREAMED)
    found = beside(quicker, (first_token(512, 0.1),))
    assert (found.turn_s, found.row_s, found.push_s) == pytest.approx((0.0, 0.0, 0.0))
    assert found.slowdowns == pytest.approx(NO_SLOWDOWN)
    fewer = replace(STREAMED[0], step_s=0.011)
    assert beside((fewer, STREAMED[1]), FIRST).row_s == 0.0, "a row more takes none less"
    upside_down = tuple(first_token(n, 9 / n) for n in (128, 512))
    assert beside(STREAMED, upside_down).prompt_factor == 1.0
    found = beside(STREAMED[1:2], ())
    assert found == BesideSteps(turn_s=found.turn_s)
    assert found.turn_s == pytest.approx(0.002)
