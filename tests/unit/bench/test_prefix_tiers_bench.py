"""The figures of bench.prefix_tiers: each prompt is computed, then in the pool, then kept."""

from __future__ import annotations

from bench.prefix_tiers import measure
from engine.core.scheduler import Scheduler
from tests.support.engine.build import STRICT, Engine, make_request

NUM_TOKENS = 16


class Played:
    """An engine without a model, in which a token takes a second."""

    def __init__(self) -> None:
        self._engine = Engine(
            num_blocks=NUM_TOKENS // 4 + 2,
            seats=1,
            num_host_blocks=64,
            keeps_prefixes=True,
            **STRICT,
        )
        self.scheduler: Scheduler = self._engine.scheduler

    def first_token_s(self, prompt: list[int]) -> float:
        num_before = self.scheduler.statistics().counters.num_chunk_tokens
        self._engine.add(make_request(tuple(token % 990 for token in prompt), max_tokens=1))
        self._engine.run()
        num_after = self.scheduler.statistics().counters.num_chunk_tokens
        for _ in range(3):
            self._engine.step()
        return num_after - num_before


def test_what_is_cached_or_kept_is_not_computed() -> None:
    figures = measure(Played(), NUM_TOKENS, 3)
    assert figures.pop("copied_mb") > 0
    assert figures == {
        "computed_ms": 1000.0 * (NUM_TOKENS + 1),
        "pool_ms": 1000.0,
        "host_ms": 1000.0,
        "host_tokens": NUM_TOKENS - 4,
    }
