"""Long conversations whose history is edited, cut or gone back to: what stands is found again."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.engine.build import Engine, check_idle, make_request
from tests.support.engine.keeping import check_answer

BLOCK = 4
TURNS = 60


def edited(history: list[int], random: Random) -> list[int]:
    """The history of the next request, as clients make it of the last one."""
    at = random.randrange(len(history))
    match random.choice(["goes on", "goes on", "edits", "cuts", "cuts the middle", "begins again"]):
        case "goes on":
            return history
        case "edits":
            return [*history[:at], random.randrange(990), *history[at + 1 :]]
        case "cuts":
            return history[: at + 1]
        case "cuts the middle":
            return [*history[:8], *history[max(8, at) :]]
    return [random.randrange(990) for _ in range(9)]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with alike."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@pytest.mark.covers("F150")
@pytest.mark.parametrize("num_blocks", [4000, 120])
@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("seed", range(3))
def test_what_stands_of_a_history_is_found_and_the_rest_computed(
    seed: int, budget: int, num_blocks: int
) -> None:
    random = Random(seed)
    engine = Engine(num_blocks=num_blocks, seats=2, budget=budget, max_model_len=400)
    history = [random.randrange(990) for _ in range(9)]
    computed: list[tuple[int, ...]] = []
    for turn in range(TURNS):
        history = [*edited(history, random), *(random.randrange(990) for _ in range(5))][:380]
        prompt = tuple(history)
        asked = engine.add(make_request(prompt, seed=turn, max_tokens=6, ignore_eos=True))
        engine.run(2000)
        check_answer(engine, asked)
        check_idle(engine.scheduler)
        standing = max((common(prompt, one) for one in computed), default=0)
        found = min(standing, len(prompt) - 1) // BLOCK * BLOCK
        if num_blocks == 4000:  # nothing was evicted
            assert asked.num_cached_tokens == found
        assert asked.num_cached_tokens <= found
        output = engine.outputs[asked.sequence_id]
        computed.append((*prompt, *output[:-1]))  # the last token was drawn and not computed
        history += output
