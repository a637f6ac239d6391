"""Play sessions on a cluster: every agent asks, waits for the whole answer, thinks, asks again.

Or ask several clusters the same prompts by turns, one at a time: what else the machine does
meanwhile favours none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from bench.agents.sessions import Session, Turn
from bench.running_cluster import Answer, RunningCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One turn that was answered: its index, lengths in tokens, and the times to its first token
    and to its last one."""

    turn: int
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float
    took_s: float

    @property
    def num_computed(self) -> int:
        """Prompt tokens that no cache held."""
        return self.num_prompt_tokens - self.num_cached_tokens


async def play(
    cluster: RunningCluster,
    sessions: Sequence[Session],
    *,
    is_named: bool,
    halfway: Callable[[], Awaitable[None]] | None = None,
) -> list[Asked]:
    """Play all sessions at a time and return every turn; `is_named`: requests name their session.

    `halfway` is run beside them once half of all turns are answered. Raises what it raises, and
    `RuntimeError` when a request fails.
    """
    asked: list[Asked] = []
    is_half = asyncio.Event()
    half = sum(len(session.turns) for session in sessions) // 2

    def on_asked(one: Asked) -> None:
        asked.append(one)
        if len(asked) >= half:
            is_half.set()

    async def meanwhile() -> None:
        await is_half.wait()
        if halfway is not None:
            await halfway()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(meanwhile())
        for session in sessions:
            tasks.create_task(_play_one(cluster, session, is_named, on_asked))
    return asked


async def play_by_turns(
    clusters: Mapping[str, RunningCluster], sessions: Sequence[Session], *, named: Set[str]
) -> dict[str, list[Asked]]:
    """Ask each cluster for every turn, with what is new in it alone; return them by cluster.

    The first one to be asked is another one with each turn. Requests to clusters of `named` name
    their session. Raises `RuntimeError` when a request fails.
    """
    asked: dict[str, list[Asked]] = {name: [] for name in clusters}
    order = list(clusters)
    for session in sessions:
        for index, turn in enumerate(session.turns):
            for name in order:
                headers = _headers(session, is_named=name in named)
                answer = await clusters[name].answer(_body(turn.new_tokens, turn), headers)
                asked[name].append(_asked(index, answer))
            order.reverse()
    return asked


async def _play_one(
    cluster: RunningCluster, session: Session, is_named: bool, on_asked: Callable[[Asked], None]
) -> None:
    headers = _headers(session, is_named=is_named)
    said: list[tuple[int, ...]] = []
    for index, turn in enumerate(session.turns):
        await asyncio.sleep(turn.think_s)
        before = said[turn.parent] if turn.parent >= 0 else session.system
        prompt = (*before, *turn.new_tokens)
        answer = await cluster.answer(_body(prompt, turn), headers)
        said.append((*prompt, *answer.token_ids))
        on_asked(_asked(index, answer))


def _headers(session: Session, *, is_named: bool) -> dict[str, str]:
    return {"x-session-id": session.name} if is_named else {}


def _body(prompt: tuple[int, ...], turn: Turn) -> dict[str, object]:
    return {
        "prompt": list(prompt),
        "max_tokens": turn.num_answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _asked(index: int, answer: Answer) -> Asked:
    return Asked(
        turn=index,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        ttft_s=answer.timing.ttft_s,
        took_s=answer.timing.chunk_at_s[-1] - answer.timing.arrived_at_s,
    )
