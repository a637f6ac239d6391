"""One pool for everybody: literal hits, with room and without."""

from __future__ import annotations

from simulator.shared_pool import num_found_tokens
from simulator.trace_file import TraceRequest


def found(pool: int, *prompts: tuple[int, ...], length: int = 1536) -> int:
    return num_found_tokens((TraceRequest(0.0, length, 1, ids) for ids in prompts), pool, 64)


def test_a_prompt_finds_the_beginning_that_was_there_before() -> None:
    assert found(10**6, (1, 2, 3)) == 0
    assert found(10**6, (1, 2, 3), (1, 2, 4)) == 1024
    assert found(10**6, (1, 2, 3), (5, 2, 3)) == 0
    # A name elsewhere in a prompt is another content.
    assert found(10**6, (1, 2, 3), (2, 1, 3)) == 0


def test_the_block_of_the_last_token_is_computed() -> None:
    assert found(10**6, (1, 2, 3), (1, 2, 3)) == 1472
    assert found(10**6, (1, 2, 3), (1, 2, 3), length=1500) == 1472
    assert found(10**6, (1, 2, 3), (1, 2, 3), length=1473) == 1472
    assert found(10**6, (1, 2, 3), (1, 2, 3), length=1472) == 1408


def test_what_was_used_least_recently_goes_first_the_end_before_the_beginning() -> None:
    prompts = [(1, 2, 3), (7, 8, 9), (1, 2, 3)]
    assert found(6 * 512, *prompts) == 1472
    assert found(5 * 512, *prompts) == 1024
    assert found(3 * 512, *prompts) == 0
    assert found(5 * 512, (1, 2, 3), (7, 8, 9), (1, 2, 4), (7, 8, 9)) == 1024 + 1024
