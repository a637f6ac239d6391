"""Where the time to the first token went, as a dispatcher over scripted nodes tells it."""

from __future__ import annotations

import pytest

from common.nodes import Role
from common.request import FinishReason
from router.core.generation import TokenChunk
from router.core.ttft_stages import Stage
from tests.integration.scripted_cluster import Cluster, asked, start, tokens
from tests.integration.scripted_cluster import scripted_cluster as scripted_cluster

HOURS_S = 7200.0
LENGTH = FinishReason.LENGTH


def stages_of(chunks: list[TokenChunk]) -> dict[Stage, float]:
    """The stages of the first chunk, which add up; later ones have none."""
    first, *later = chunks
    assert all(chunk.of_prompt is None for chunk in later)
    assert first.of_prompt is not None
    stages = first.of_prompt.stages
    assert stages is not None
    waited_s = stages.ended_at_s - stages.began_at_s
    assert sum(stages.spans_s.values()) == pytest.approx(waited_s, abs=1e-9)
    assert min(stages.spans_s.values()) >= 0
    return dict(stages.spans_s)


async def test_what_the_prefill_node_says_splits_the_wait(cluster: Cluster) -> None:
    p, d = await cluster.add("p0", Role.PREFILL), await cluster.add("d0", Role.DECODE)
    answer = start(await cluster.router())
    request = await asked(p)
    # More than anybody waited: the computation then is all of it.
    p.push(tokens(request.id, 0, 10, queue_s=HOURS_S, compute_s=HOURS_S))
    d.push(tokens(request.id, 1, *range(11, 18), is_started=True, finish_reason=LENGTH))
    stages = stages_of(await answer)
    assert stages[Stage.RESERVE] > 0
    assert stages[Stage.PREFILL_COMPUTE] > 0
    assert stages[Stage.PREFILL_QUEUE] == stages[Stage.DELIVERY] == stages[Stage.RETRIES] == 0


async def test_an_attempt_that_was_lost_is_time_of_retries(cluster: Cluster) -> None:
    p, d = await cluster.add("p0", Role.PREFILL), await cluster.add("d0", Role.DECODE)
    answer = start(await cluster.router())
    first = await asked(p)
    await p.die()
    second = await asked(d, 2)
    assert second.id.attempt == first.id.attempt + 1
    d.push(tokens(second.id, 0, *range(10, 18), compute_s=0.000_001, finish_reason=LENGTH))
    stages = stages_of(await answer)
    assert stages[Stage.RETRIES] > 0
    assert stages[Stage.PREFILL_COMPUTE] == 0.000_001
    assert stages[Stage.DELIVERY] > 0
