"""The simulator's router, with a check of each request that ends for want of room."""

from __future__ import annotations

from typing import Any

from common.errors import Overloaded, PdserveError
from common.ids import Incarnation
from common.nodes import Role
from common.request import RequestOutput
from node.flow.messages import Answer, CallRefused
from router.core.effects import SendReserve
from simulator.faults.demand.lengths import check_too_long
from simulator.faults.demand.refusals import Refusals
from simulator.router import SimulatedRouter, _Choice
from simulator.served import TokenTimes
from simulator.timeline import Timeline


class WatchedRouter(SimulatedRouter):
    """Records the refusals of nodes. `settings` are those of a `SimulatedRouter`."""

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

    def _on_output(self, node: Incarnation, output: RequestOutput, times: TokenTimes) -> None:
        if output.details.error_code == Overloaded.code:
            self._refusals.on_late_refusal(output.id.choice_id, node)
        super()._on_output(node, output, times)

    def _reserve(self, choice: _Choice, effect: SendReserve) -> None:
        name = effect.request.id.choice_id
        self._refusals.on_reserve(name, effect.node, may_wait=effect.may_wait)
        super()._reserve(choice, effect)

    def _fail(self, choice: _Choice, error: PdserveError) -> None:
        candidates, name = choice.flow._candidates, choice.flow.attempt.choice_id
        flow, query = choice.flow, choice.query
        staying = [one.record for one in self._membership.nodes() if not one.load.is_draining]
        num_wanted = flow.num_output_tokens + 1 if flow._is_cut_to_fit else query.max_tokens
        is_one_token = query.max_tokens == 1
        num_wanted += len(query.prompt_token_ids)
        check_too_long(name, error, num_wanted, staying, is_one_token=is_one_token)
        able = {
            record.incarnation
            for record in staying
            if record.role is not Role.PREFILL and query.fits(record)
        }
        able -= candidates._failed | candidates._unfit
        is_over_losses = candidates.has_lost_too_many
        self._refusals.on_end(name, error, able, is_over_losses=is_over_losses)
        super()._fail(choice, error)
