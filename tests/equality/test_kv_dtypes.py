"""The demo model answers alike however it is scheduled, also with keys and values in few bits.

A part of `test_under_pressure` for each type of the KV cache, and for both arithmetics: both ways
to preempt, speculation by a layer whose KV is stored too, steps planned ahead, and a handoff
between two pools. A part of `--every-combination`.
"""

from __future__ import annotations

import pytest

from common.request import GenerationRequest
from engine.runner.model_runner import ModelRunner
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.equality.combinations import (
    Combination,
    answers_alone,
    check_pressure,
    prefill_node,
    pressed_node,
    requests,
)
from tests.support.models.pressure import (
    NUM_DRAFTS,
    answer_together,
    answer_with_handoff,
    load_runner,
)

__all__ = ["requests"]
WITH_LAYER: Combination = ("token_ratio", "shortest_output", "swap", "mtp", "sync")
IN_BYTES, WIDE = ("int8", "int8"), ("float32", "bfloat16")
"""What products take, and what the KV cache stores."""
Case = tuple[tuple[str, str], Combination]
CASES: tuple[Case, ...] = (
    (IN_BYTES, WITH_LAYER),
    (IN_BYTES, ("none", "last_in_first_out", "recompute", "mtp", "sync")),
    (IN_BYTES, ("fixed_blocks", "priority", "swap", "none", "async")),
    (WIDE, WITH_LAYER),
    *((("float32", dtype), WITH_LAYER) for dtype in ("float32", "int8")),
)

Runners = tuple[ModelRunner, ModelRunner]


@pytest.fixture(scope="module")
def loaded() -> dict[tuple[str, str], Runners]:
    """The runners of each arithmetic: pytest makes `runners` anew for each combination."""
    return {}


@pytest.fixture(scope="module")
def runners(request: pytest.FixtureRequest, loaded: dict[tuple[str, str], Runners]) -> Runners:
    activations, dtype = request.param
    if request.param not in loaded:
        first, second = (
            load_runner(
                demo_model_folder(), NUM_DRAFTS,
                activation_dtype=activations, kv_cache_dtype=dtype,
            )
            for _ in range(2)
        )  # fmt: skip
        assert first.layout.dtype == dtype
        assert first.layout.fingerprint == second.layout.fingerprint
        loaded[request.param] = first, second
    return loaded[request.param]


@pytest.fixture(scope="module")
def undisturbed(runners: Runners, requests: list[GenerationRequest]) -> list[list[int]]:
    return answers_alone(runners[0], requests)


@pytest.mark.parametrize(("runners", "combination"), CASES, indirect=["runners"], ids=str)
def test_preempted_and_handed_over(
    combination: Combination,
    runners: Runners,
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    alone = pressed_node(runners[0], combination)
    assert answer_together(alone, requests) == undisturbed
    check_pressure(alone, combination)
    prefill = prefill_node(runners[0], combination)
    decode = pressed_node(runners[1], combination)
    assert answer_with_handoff(prefill, decode, requests) == undisturbed
    check_pressure(decode, combination)
