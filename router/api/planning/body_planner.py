"""Where a body is planned: on the event loop, on a thread, or by the planning process.

What holds the interpreter's lock stops every stream of the router, on a thread as well. The bounds
are such that no body stops it for 50 ms; `bench.router.planning` measures it. Each grammar that is
new to this router is tried in a process of its own, where clients take turns, and every one in GBNF
is translated there. No body waits for another one's grammar.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from common.grammar import Grammar
from grammars.gbnf import Gbnf
from grammars.trying.messages import Trial, Verdict
from router.api.bodies.asked import RequestKind
from router.api.planning.planner import Planner, RequestPlan
from router.api.planning.process import LargeBodies
from router.text.text_model import TextModel

INLINE_BODY_BYTES = 8 << 10
"""Bodies up to this size are planned on the event loop, so the slowest text counts: digits, each a
token of its own."""
MAX_THREAD_BODY_BYTES = 128 << 10
"""Larger bodies are planned by the planning process; on a thread, parsing counts."""
MAX_REMEMBERED_BYTES = 4 << 20
"""Most bytes of the texts of grammars that are known to compile."""
BYTES_PER_TURN = 8 << 10
"""Most bytes of bodies in one turn; one body may have more. Requests that begin together share
messages to the nodes: with half as much, 128 saturated streams send five times as many."""
LEAST_BYTES = 512
"""The bytes as which a shorter body counts: it takes as long."""


class TriesGrammars(Protocol):
    """Tries grammars without holding up the event loop: `grammars.trying.trials.GrammarTrials`."""

    def begin(self, trial: Trial, client: str = "") -> Future[Verdict]:
        """Ask for a trial; clients take turns."""


@dataclass
class _NeedsTranslation(Exception):
    """A body holds a grammar whose translation takes long."""

    gbnf: Gbnf


def _leave_to_a_trial(gbnf: Gbnf) -> NoReturn:
    raise _NeedsTranslation(gbnf)


class PlanningTurns:
    """The turns that all requests share: a few bodies in each, first come, first served.

    The requests of a burst are read in one turn of the event loop. Planned in one turn as well, the
    first of them would ask its nodes only when the last one is planned, and all of them would wait
    for their first tokens as long as that takes.
    """

    def __init__(self) -> None:
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def next(self, num_bytes: int) -> None:
        """Return in a turn that has room for a body of `num_bytes`."""
        num_bytes = max(num_bytes, LEAST_BYTES)
        if not self._waiting and self._has_room(num_bytes):
            self._take(num_bytes)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        await turn

    def _has_room(self, num_bytes: int) -> bool:
        return not self._taken_bytes or self._taken_bytes + num_bytes <= BYTES_PER_TURN

    def _take(self, num_bytes: int) -> None:
        if not self._taken_bytes:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._taken_bytes += num_bytes

    def _begin_turn(self) -> None:
        self._taken_bytes = 0
        while self._waiting and self._has_room(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():  # its request may have ended
                turn.set_result(None)
                self._take(num_bytes)


class BodyPlanner:
    """Plans the bodies of one model's requests."""

    def __init__(
        self, text_model: TextModel, large_bodies: LargeBodies, trials: TriesGrammars
    ) -> None:
        self._model = text_model
        self._large_bodies = large_bodies
        self._trials = trials
        self._turns = PlanningTurns()
        # One thread: each further one would hold the interpreter's lock as often as the loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planning")
        self._followed: OrderedDict[Grammar, Grammar] = OrderedDict()
        self._followed_bytes = 0

    async def plan(
        self, kind: RequestKind, body: bytes, max_model_len: int, client: str = ""
    ) -> RequestPlan:
        """Return the plan of `body` for at most `max_model_len` tokens in all.

        Where grammars of several clients wait, `client` has its turn. Raises what `Planner`,
        `LargeBodies` and a trial raise.
        """
        try:
            plan = await self._planned(kind, body, max_model_len, _leave_to_a_trial)
        except _NeedsTranslation as needs:
            verdict = await asyncio.wrap_future(self._trials.begin(Trial(needs.gbnf), client))
            lark = verdict.instead
            assert lark is not None
            plan = await self._planned(kind, body, max_model_len, lambda gbnf: lark)
        grammar = plan.sampling.grammar
        if grammar is None:
            return plan
        followed = self._followed.get(grammar)
        if followed is None:
            trial = Trial(grammar, plan.grammar_parts)
            verdict = await asyncio.wrap_future(self._trials.begin(trial, client))
            followed = verdict.instead or grammar
            self._remember(grammar, followed)
        if followed == grammar:
            return plan
        return plan._replace(sampling=replace(plan.sampling, grammar=followed))

    async def _planned(
        self,
        kind: RequestKind,
        body: bytes,
        max_model_len: int,
        translate: Callable[[Gbnf], Grammar],
    ) -> RequestPlan:
        if len(body) > MAX_THREAD_BODY_BYTES:
            return await self._large_bodies.plan(kind, body, max_model_len)
        is_inline = len(body) <= INLINE_BODY_BYTES
        if is_inline:
            await self._turns.next(len(body))
        planner = Planner(
            self._model,
            max_model_len,
            draw_seed=lambda: secrets.randbits(64),
            translate=translate,
        )
        if is_inline:
            return planner.plan(kind, body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, planner.plan, kind, body)

    def _remember(self, grammar: Grammar, followed: Grammar) -> None:
        """Note what is followed where a request has `grammar`, and that it compiles."""
        if grammar in self._followed:
            return
        self._followed[grammar] = followed
        self._followed_bytes += _weight(grammar, followed)
        while self._followed_bytes > MAX_REMEMBERED_BYTES:
            self._followed_bytes -= _weight(*self._followed.popitem(last=False))


def _weight(grammar: Grammar, followed: Grammar) -> int:
    return len(grammar.text) + (0 if followed is grammar else len(followed.text))
