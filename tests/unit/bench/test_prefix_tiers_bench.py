"""The figures of bench.prefix_tiers: each prompt is computed, then in the pool, then kept."""

from __future__ import annotations

from pathlib import Path

from bench.prefix_tiers import DiskTier, measure
from engine.core.blocks.disk_index import DiskIndex
from engine.core.scheduler import Scheduler
from engine.prefix_disk.block_folder import BlockFolder
from tests.support.engine.build import STRICT, Engine, make_request

NUM_TOKENS = 16


class Played:
    """An engine without a model, in which a token takes a second."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(
            num_blocks=NUM_TOKENS // 4 + 2,
            seats=1,
            num_host_blocks=64,
            keeps_prefixes=True,
            disk_index=DiskIndex(1 << 30, 1000),
            **STRICT,
        )
        self.scheduler: Scheduler = self._engine.scheduler
        runner = self._engine.runner
        fingerprint, host_kv = runner.layout.fingerprint, runner.host_kv
        self._disk = DiskTier(self.scheduler, BlockFolder(folder, fingerprint, host_kv))
        self.forget_host = self._disk.forget_host

    def first_token_s(self, prompt: list[int]) -> float:
        num_before = self.scheduler.statistics().counters.num_chunk_tokens
        request = make_request(tuple(token % 990 for token in prompt), max_tokens=1)
        self._disk.fetch(self._engine.add(request))
        self._engine.run()
        num_after = self.scheduler.statistics().counters.num_chunk_tokens
        for _ in range(3):
            self._engine.step()
            self._disk.save()
        return num_after - num_before


def test_what_is_cached_or_kept_is_not_computed(tmp_path: Path) -> None:
    figures = measure(Played(tmp_path / "d"), NUM_TOKENS, 3)
    assert figures.pop("copied_mb") > 0
    assert figures == {
        "computed_ms": 1000.0 * (NUM_TOKENS + 1),
        "pool_ms": 1000.0,
        "host_ms": 1000.0,
        "disk_ms": 1000.0,
        "host_tokens": NUM_TOKENS - 4,
        "disk_tokens": NUM_TOKENS - 4,
    }
