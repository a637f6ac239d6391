"""The simulator's router, of which each request that ends for want of room is looked into."""

from __future__ import annotations

from typing import Any

from common.errors import PdserveError
from common.ids import Incarnation
from common.nodes import Role
from node.flow.messages import Answer, CallRefused
from router.core.effects import SendReserve
from simulator.faults.demand.refusals import Refusals
from simulator.router import SimulatedRouter, _Choice
from simulator.timeline import Timeline


class WatchedRouter(SimulatedRouter):
    """Keeps what nodes refuse. `settings` are those of a `SimulatedRouter`."""

    def __init__(self, timeline: Timeline, **settings: Any) -> None:
        super().__init__(timeline, **settings)
        self._refusals = Refusals()

    def _on_answer(self, node: Incarnation, reply_to: int, answer: Answer) -> None:
        choice, _, attempt = self._calls[reply_to]
        flow = choice.flow
        if isinstance(answer, CallRefused) and flow._attempts.find(attempt) is not None:
            is_prompt, name = node == flow.prefill, attempt.choice_id
            self._refusals.on_refusal(name, node, answer.error, is_prompt=is_prompt)
        super()._on_answer(node, reply_to, answer)

    def _reserve(self, choice: _Choice, effect: SendReserve) -> None:
        name = effect.request.id.choice_id
        self._refusals.on_reserve(name, effect.node, may_wait=effect.may_wait)
        super()._reserve(choice, effect)

    def _fail(self, choice: _Choice, error: PdserveError) -> None:
        candidates, name = choice.flow._candidates, choice.flow.attempt.choice_id
        able = {
            view.incarnation
            for view in self._membership.nodes()
            if view.record.role is not Role.PREFILL
            and not view.load.is_draining
            and choice.query.fits(view.record)
        }
        able -= candidates._failed | candidates._unfit
        is_over_losses = candidates.has_lost_too_many
        self._refusals.on_end(name, error, able, is_over_losses=is_over_losses)
        super()._fail(choice, error)
