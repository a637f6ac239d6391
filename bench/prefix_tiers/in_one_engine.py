"""One engine and one prompt at a time, whose start is in one of its tiers or in none."""

from __future__ import annotations

import statistics
import time
from itertools import count
from pathlib import Path
from typing import Protocol

from bench.engine.__main__ import synthetic_prompt
from common.files.cache_folder import cache_root
from common.ids import AttemptId
from common.nodes import Role
from common.request import GenerationRequest, SamplingParams
from common.settings.config import Config, EngineConfig, ModelConfig
from engine.core.blocks.disk_jobs import DiskLook
from engine.core.runner_contract import RunnerResult
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_in_flight import PlannedStep
from engine.prefix_disk.block_folder import BlockFolder
from engine.runner.start.load import load_model_runner
from node.life.make_scheduler import host_space_of, make_scheduler
from node.life.prefix_disk import disk_index_of

BLOCK_BYTES = 2_949_120
"""The size of a block of 64 tokens of the demo model, in float32."""
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Timed(Protocol):
    """An engine that answers one prompt at a time."""

    scheduler: Scheduler

    def first_token_s(self, prompt: list[int]) -> float:
        """Return the seconds until a prompt that nobody waits before has its token."""

    def forget_host(self) -> None:
        """Evict all prefixes from host memory."""


class DiskTier:
    """What a node's flow and threads do with files, at once."""

    def __init__(self, scheduler: Scheduler, folder: BlockFolder) -> None:
        self._prefixes, self._host_pool = scheduler.disk_prefixes, scheduler.host_pool
        self._folder = folder
        self._prefixes.end_look(folder.look(DiskLook(is_all=True)), is_all=True)

    def fetch(self, sequence: Sequence) -> None:
        """Read what a sequence lacks into host memory."""
        found = self._prefixes.find(sequence)
        if found is not None:
            sequence.sought_on_disk = found.sought
            read = self._prefixes.begin_read(found.hashes)
            self._prefixes.end_read(read, self._folder.read(read))

    def save(self) -> None:
        """Write what host memory would evict."""
        while (write := self._prefixes.begin_write()) is not None:
            self._prefixes.end_write(write, self._folder.write(write))

    def forget_host(self) -> None:
        """Evict all prefixes from host memory."""
        self._host_pool.release(self._host_pool.allocate(self._host_pool.num_available))


class Engine:
    """A scheduler and the runner of a mixed node, driven step by step as its loop does."""

    def __init__(self, folder: Path, num_tokens: int, disk: Path) -> None:
        size = EngineConfig().block_size
        memory = (num_tokens // size + 2) * BLOCK_BYTES  # little more than one prompt
        engine = EngineConfig(
            kv_cache_memory=memory,
            prefix_host_memory=4 * memory,
            prefix_disk=str(disk),
            prefix_disk_size=16 * memory,
        )
        config = Config(role=Role.MIXED, model=ModelConfig(model=str(folder)), engine=engine)
        self._runner = load_model_runner(
            config.model,
            config.engine,
            host_space=host_space_of(config),
            packed_folder=cache_root() / "packed",
        )
        self._runner.warm_up()
        index = disk_index_of(config, self._runner)
        self.scheduler = make_scheduler(config, self._runner, index)
        layout, host_kv = self._runner.layout, self._runner.host_kv
        self._disk = DiskTier(self.scheduler, BlockFolder(disk, layout.fingerprint, host_kv))
        self.forget_host = self._disk.forget_host
        self._ids = count(1)

    def first_token_s(self, prompt: list[int]) -> float:
        """Return the seconds until a prompt that nobody waits before has its token."""
        number = next(self._ids)
        request = GenerationRequest(
            id=AttemptId(f"r{number}", 1),
            prompt_token_ids=tuple(prompt),
            sampling=SAMPLING,
            deadline_s=600.0,
        )
        sequence = Sequence(number, request)
        started_s = time.perf_counter()
        self._disk.fetch(sequence)
        self.scheduler.add(sequence)
        while sequence.num_output == 0:
            self._step()
        took_s = time.perf_counter() - started_s
        while self._step().made_progress:
            self._disk.save()  # what is to be copied out is, before the next prompt
        return took_s

    def _step(self) -> PlannedStep:
        step = self.scheduler.plan()
        for copy in step.swap_outs:
            self._runner.swap_out(copy.block_ids, copy.host_block_ids)
        for copy in step.swap_ins:
            self._runner.swap_in(copy.host_block_ids, copy.block_ids)
        result = self._runner.execute(step.batch) if step.batch else RunnerResult()
        self.scheduler.apply(step, result)
        return step


def measure(engine: Timed, num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Return the medians of so many prompts; `bench/prefix_tiers/__main__.py` has their names."""
    names = ("computed_ms", "pool_ms", "host_ms", "disk_ms")
    spans: dict[str, list[float]] = {name: [] for name in names}
    numbers = count(1)
    for _ in range(num_rounds):
        start = synthetic_prompt(num_tokens, next(numbers))
        spans["computed_ms"].append(1e3 * engine.first_token_s([*start, 5]))
        spans["pool_ms"].append(1e3 * engine.first_token_s([*start, 6]))
        for last, name in ((7, "host_ms"), (8, "disk_ms")):
            # This takes all but a block of the cache.
            engine.first_token_s(synthetic_prompt(num_tokens + 1, next(numbers)))
            if name == "disk_ms":
                engine.forget_host()
            spans[name].append(1e3 * engine.first_token_s([*start, last]))
    counters = engine.scheduler.statistics().counters
    figures = {name: round(statistics.median(found), 1) for name, found in spans.items()}
    figures["copied_mb"] = round(
        counters.prefix_blocks_found["host"] / num_rounds * BLOCK_BYTES / 2**20, 1
    )
    size = engine.scheduler.limits.block_size
    for tier in ("host", "disk"):
        figures[f"{tier}_tokens"] = counters.prefix_blocks_found[tier] // num_rounds * size
    return figures
