"""The simulator's router, with a check of each request that ends for want of room."""

from __future__ import annotations

from typing import Any

from common.errors import (
    Draining,
    HandoffFailed,
    InternalError,
    NodeLost,
    Overloaded,
    PdserveError,
    StaleEpoch,
)
from common.ids import Incarnation
from common.nodes import Role
from common.request import RequestOutput
from node.flow.messages import Answer, CallRefused
from router.core.candidates import MAX_FAILURES
from router.core.effects import Effect, SendReserve
from router.core.policies.query import NoneStays
from simulator.faults.demand.lengths import check_too_long
from simulator.faults.demand.refusals import Refusals
from simulator.router import SimulatedRouter, _Choice
from simulator.served import TokenTimes
from simulator.timeline import Timeline

_OF_NODES = (NodeLost, HandoffFailed, StaleEpoch)
"""What may end an attempt, and not its request while another node can go on."""


class WatchedRouter(SimulatedRouter):
    """Records the refusals of nodes. `settings` are those of a `SimulatedRouter`."""

    def __init__(self, timeline: Timeline, **settings: Any) -> None:
        super().__init__(timeline, **settings)
        self._refusals = Refusals()

    def _on_answer(self, node: Incarnation, reply_to: int, answer: Answer) -> None:
        call = self._calls[reply_to]
        is_known = call.choice.flow._attempts.find(call.attempt) is not None
        if isinstance(answer, CallRefused) and is_known:
            name, error = call.attempt.choice_id, answer.error
            self._refusals.on_refusal(name, node, error, is_prompt=call.is_prompt)
        super()._on_answer(node, reply_to, answer)

    def _on_output(self, node: Incarnation, output: RequestOutput, times: TokenTimes) -> None:
        if output.details.error_code == Overloaded.code:
            self._refusals.on_late_refusal(output.id.choice_id, node)
        super()._on_output(node, output, times)

    def _reserve(self, choice: _Choice, effect: SendReserve) -> None:
        name = effect.request.id.choice_id
        self._refusals.on_reserve(name, effect.node, may_wait=effect.may_wait)
        super()._reserve(choice, effect)

    def _on_none_left(self, choice: _Choice, error: PdserveError) -> list[Effect]:
        if isinstance(error, NoneStays):
            self._refusals.on_none_stays(choice.flow.attempt.choice_id)
            nodes = [one for one in self._membership.nodes() if not one.load.is_draining]
            staying = [one.incarnation for one in nodes if one.record.role is not Role.PREFILL]
            if staying:
                raise InternalError(f"{staying} decode, and are taken for nodes that leave")
        return super()._on_none_left(choice, error)

    def _fail(self, choice: _Choice, error: PdserveError) -> None:
        candidates, name = choice.flow._candidates, choice.flow.attempt.choice_id
        flow, query = choice.flow, choice.query
        staying = [one.record for one in self._membership.nodes() if not one.load.is_draining]
        num_wanted = flow.num_output_tokens + 1 if flow._is_cut_to_fit else query.max_tokens
        is_one_token = query.max_tokens == 1
        num_wanted += len(query.prompt_token_ids)
        check_too_long(name, error, num_wanted, staying, is_one_token=is_one_token)
        decoding = [record for record in staying if record.role is not Role.PREFILL]
        able = {record.incarnation for record in decoding if query.fits(record)}
        able -= candidates._failed | candidates._unfit
        is_over_losses = candidates.has_lost_too_many
        refused = self._refusals.on_end(name, error, able, is_over_losses=is_over_losses)
        left = able - refused
        # One whose node was lost waits for another, unless all that are there are too short, and
        # one whose nodes have failed it waits where none stays.
        waits = isinstance(error, NodeLost) or not decoding
        is_over = candidates._is_too_long or isinstance(candidates.failure, Draining)
        has_more = bool(left) if is_over else waits or bool(left)
        is_hopeless = is_over_losses or candidates._num_failures >= MAX_FAILURES
        if isinstance(error, _OF_NODES) and has_more and not is_hopeless:
            raise InternalError(f"{name} ends by {error.code}, and can go on: {left or 'it waits'}")
        super()._fail(choice, error)
