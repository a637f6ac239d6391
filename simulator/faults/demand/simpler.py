"""A history with one demand less, to find the demands without which it is not wrong. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from simulator.faults.history import History
from simulator.faults.shape import MOST_QUEUED, Shape

Simpler = Callable[[History], History]


def simpler_demands() -> Iterator[Simpler]:
    """Yield changes, each of which takes one demand off a history that has it."""
    yield lambda history: _shaped(history, sheds=False)
    yield lambda history: _shaped(history, max_queued=MOST_QUEUED)
    yield lambda history: _shaped(history, pools=())
    usual = {one.name: one.default for one in fields(Shape) if isinstance(one.default, int)}
    yield lambda history: _shaped(history, reservation_policy="none")
    yield lambda history: _shaped(history, **usual)
    yield lambda history: _asked(history, is_cut=False)
    yield lambda history: _asked(history, salt="")
    yield lambda history: _asked(history, grammar="")
    yield lambda history: _asked(history, has_logprobs=False, has_prompt_logprobs=False)


def _shaped(history: History, **changed: Any) -> History:
    return replace(history, shape=replace(history.shape, **changed))


def _asked(history: History, **changed: Any) -> History:
    return replace(history, requests=tuple(replace(one, **changed) for one in history.requests))
