"""A node with small memories and a folder: what it computed, the next life of it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from common.ids import Incarnation
from common.nodes import Role
from common.settings.config import Config
from engine.core.runner_contract import StepCosts
from node.control import control_service
from tests.support.engine.build import make_prompt, make_request
from tests.support.engine.hash_runner import HashRunner, expected_tokens
from tests.support.nodes.running_node import RunningNode, node_config, running_node
from tests.support.observing.samples import samples

NUM_FAMILIES = 6
WAIT_S = 60.0
BLOCKS = 'pdserve_prefix_disk_blocks{node="this"}'
OTHERS = 'pdserve_prefix_disk_blocks{node="others"}'


def config(folder: Path, role: Role = Role.MIXED, *, is_encrypted: bool = False) -> Config:
    given = node_config(role)
    engine = replace(
        given.engine,
        block_size=4,
        prefix_host_memory=1,
        prefix_disk=str(folder / "prefixes"),
        prefix_disk_size=1 << 30,
        prefix_disk_encryption=is_encrypted,
    )
    return replace(given, engine=engine)


@pytest.fixture(autouse=True)
def _patient_with_greetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine stalls, no router says too late who it is."""
    monkeypatch.setattr(control_service, "GREETING_TIMEOUT_S", 600.0)


@asynccontextmanager
async def small_node(folder: Path, secret: bytes = b"") -> AsyncIterator[RunningNode]:
    """With a secret its files are encrypted."""
    runner = HashRunner(num_blocks=9, max_model_len=28, num_host_blocks=8)
    # Computing would take a minute: on a busy machine too, nothing is read too late.
    runner.step_costs = StepCosts((1, 65), (60.0, 61.0))
    given = config(folder, is_encrypted=bool(secret))
    async with running_node(given, runner, kv_secret=secret) as node:
        yield node


class Asker:
    """Asks a node as one router after the other; checks every answer."""

    def __init__(self, node: RunningNode) -> None:
        self._node = node
        self._number = 0

    async def ask(self, family: int) -> int:
        """Return how many tokens of a prompt with this beginning were cached."""
        self._number += 1
        prompt = (*make_prompt(16, family), self._number)
        request = make_request(prompt, name=f"r{self._number}", max_tokens=3, ignore_eos=True)
        outputs = await self._node.answer(request, Incarnation(f"router-{self._number}", 1))
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == expected_tokens(prompt, request.sampling)
        return max(
            (output.counts.num_cached_tokens for output in outputs if output.counts), default=0
        )

    async def until(self, name: str, condition: Callable[[float], bool]) -> dict[str, float]:
        """Return the node's metrics when one of them is so."""
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient() as client:
            while True:
                url = f"http://{self._node.record.metrics_address}/metrics"
                found = samples((await client.get(url)).text)
                if condition(found[name]):
                    return found
                await asyncio.sleep(0.01)


async def fill(asker: Asker) -> None:
    """Use each beginning twice, and wait until it is on disk: host memory has room for two."""
    for family in range(NUM_FAMILIES):
        for _ in range(2):
            await asker.ask(family)
        num_blocks = 4 * (family + 1)
        await asker.until(BLOCKS, lambda count, wanted=num_blocks: count >= wanted)  # type: ignore[misc]


@pytest.mark.covers("F131")
@pytest.mark.parametrize("secret", [b"", b"a" * 40], ids=["plain", "encrypted"])
async def test_a_prefix_is_found_by_the_next_life_of_its_node(
    tmp_path: Path, secret: bytes
) -> None:
    async with small_node(tmp_path, secret) as node:
        await fill(Asker(node))
    async with small_node(tmp_path, secret) as node:
        asker = Asker(node)
        await asker.until(BLOCKS, lambda count: count > 0)
        assert await asker.ask(0) == 16
        found = await asker.until(
            'pdserve_prefix_disk_events_total{event="read"}', lambda count: count == 4
        )
        assert found['pdserve_prefix_blocks_found_total{tier="disk"}'] == 4
        assert await asker.ask(0) == 16
        assert len(node.runner.batches[0][0].token_ids) == 1, "computed, though it was on disk"


async def test_a_node_reads_what_another_one_of_its_host_wrote(tmp_path: Path) -> None:
    async with small_node(tmp_path) as first:
        await fill(Asker(first))
        async with small_node(tmp_path) as second:
            asker = Asker(second)
            await asker.until(OTHERS, lambda count: count >= 8)
            assert await asker.ask(0) == 16
            folders = sorted(one.name for one in (tmp_path / "prefixes").iterdir())
            assert folders == ["node-0", "node-1"]


async def test_a_node_without_its_disk_serves(tmp_path: Path) -> None:
    (tmp_path / "prefixes").write_text("a file where a folder is wanted")
    async with small_node(tmp_path) as node:
        asker = Asker(node)
        for family in (0, 0, 1, 1, 0):
            await asker.ask(family)
        found = await asker.until(
            'pdserve_prefix_disk_events_total{event="write_failed"}', lambda count: count == 1
        )
    assert found[BLOCKS] == 0
