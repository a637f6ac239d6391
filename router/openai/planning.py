"""Where a body is planned: on the event loop, on a thread, or by the planning process.

What holds the interpreter's lock stops every stream of the router, on a thread as well. The bounds
are such that no body stops it for 50 ms; `bench.planning` measures it. The planning process also
compiles each grammar that is new to this router and translates every one in GBNF, whatever the size
of its body.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from common.grammar import Grammar
from grammars.gbnf import Gbnf
from router.openai.planning_process import LargeBodies
from router.openai.request_plan import Planner, RequestKind, RequestPlan
from router.text.text_model import TextModel

INLINE_BODY_BYTES = 8 << 10
"""Bodies up to this size are planned on the event loop, so the slowest text counts: digits, each a
token of its own."""
MAX_THREAD_BODY_BYTES = 128 << 10
"""Larger bodies are planned by the planning process; on a thread, parsing counts."""
MAX_REMEMBERED_BYTES = 4 << 20
"""Of the texts of grammars that are known to compile."""


class _TakesLong(Exception):
    """A body is small, and a part of it takes long to read."""


def _leave_to_the_process(gbnf: Gbnf) -> NoReturn:
    raise _TakesLong


class BodyPlanner:
    """Plans the bodies of one model's requests."""

    def __init__(self, text_model: TextModel, large_bodies: LargeBodies) -> None:
        self._model = text_model
        self._large_bodies = large_bodies
        # One thread: each further one would hold the interpreter's lock as often as the loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planning")
        self._compiled: dict[Grammar, None] = {}
        self._compiled_bytes = 0

    async def plan(self, kind: RequestKind, body: bytes, max_model_len: int) -> RequestPlan:
        """Return the plan of `body` for at most `max_model_len` tokens in all.

        Raises what `Planner` and `LargeBodies` raise.
        """
        if len(body) > MAX_THREAD_BODY_BYTES:
            return await self._large_bodies.plan(kind, body, max_model_len)
        planner = Planner(
            self._model,
            max_model_len,
            draw_seed=lambda: secrets.randbits(64),
            translate=_leave_to_the_process,
        )
        try:
            if len(body) <= INLINE_BODY_BYTES:
                plan = planner.plan(kind, body)
            else:
                loop = asyncio.get_running_loop()
                plan = await loop.run_in_executor(self._thread, planner.plan, kind, body)
        except _TakesLong:
            return await self._large_bodies.plan(kind, body, max_model_len)
        if plan.grammar is not None and plan.grammar not in self._compiled:
            # The process compiles it, which may take long and much memory.
            plan = await self._large_bodies.plan(kind, body, max_model_len)
            self._remember(plan.grammar)
        return plan

    def _remember(self, grammar: Grammar | None) -> None:
        """Note that a grammar compiles."""
        if grammar is None or grammar in self._compiled:
            return
        self._compiled[grammar] = None
        self._compiled_bytes += len(grammar.text)
        while self._compiled_bytes > MAX_REMEMBERED_BYTES:
            oldest = next(iter(self._compiled))
            del self._compiled[oldest]
            self._compiled_bytes -= len(oldest.text)
