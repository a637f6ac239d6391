"""The handoff benchmark measures real handoffs between its two processes."""

from __future__ import annotations

import pytest

from bench.handoff.__main__ import measure
from bench.handoff.paced_runner import LAYOUT_8B
from bench.handoff.prefill_end import CHUNK_TOKENS, Case

NUM_BLOCKS = 10
PROMPT_TOKENS = NUM_BLOCKS * LAYOUT_8B.block_size
"""More than a chunk, and 94 MB: mapping the memory of a whole prompt takes seconds."""


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_prompt_is_handed_off_whole(transport: str) -> None:
    assert PROMPT_TOKENS > CHUNK_TOKENS
    case = Case(
        layout="synthetic_8b",
        transport=transport,
        tokens_per_s=20_000.0,
        prompt_tokens=PROMPT_TOKENS,
    )
    (one,) = measure(case, 1)
    assert one.num_bytes == NUM_BLOCKS * LAYOUT_8B.block_bytes
    assert 0 <= one.hidden_bytes <= one.num_bytes
    assert one.ttft_s >= PROMPT_TOKENS / 20_000
    assert one.exposed_s > 0
    assert one.sender_cpu_s > 0
    assert one.receiver_cpu_s > 0
