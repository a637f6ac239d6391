"""How each request of a history may end, as it follows from what is broken and when. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from common.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    InvalidRequest,
    NodeLost,
    Overloaded,
)
from common.nodes import Role
from simulator.faults.checks.fault_times import fault_times
from simulator.faults.checks.violation import Violation
from simulator.faults.contents import STOP_TOKEN_ID, logprobs_of
from simulator.faults.demand.grammars import is_refused, refusals_of_grammar
from simulator.faults.demand.lengths import fewest_tokens, may_be_too_long, tokens_wanted
from simulator.faults.demand.waiting import refusals_of
from simulator.faults.history import AskedRequest, History
from simulator.faults.kinds import CHANGES
from simulator.faults.router import Answered
from simulator.faults.shape import are_roles_by_load, longest_of, node_names

ENOUGH_S, ENOUGH_STEPS = 30.0, 500
"""A request with so much time, and for so many steps, after the last fault must be answered, if a
node can."""
HEALED_S = 20.0
"""A request that comes so long after the last fault has ended does not notice it."""
HEARD_S = 1.0
"""Time after which each router has heard every node, if nothing is broken. Routers of real clusters
answer nobody before; those of histories may know the shorter nodes alone."""
LATE_S = 1.0
LOST_WITH_ROUTER = "router_lost"
LEFT = "abort"
FINISHED = ("stop", "length")
BY_FAULTS = frozenset(
    {
        *("deadline_exceeded", "deadline_unreachable", "overloaded", "node_lost", "draining"),
        *("handoff_failed", "stale_epoch", LOST_WITH_ROUTER),
    }
)
"""How a request may end where something was broken."""
OF_NODES = frozenset({"node_lost", "draining", "handoff_failed", "stale_epoch", "internal_error"})
"""How it may not end where nodes do what they can."""
BY_STEPS = BY_FAULTS | {"internal_error"}
"""How it may end where steps have failed."""
WITHOUT_FAULTS = frozenset({"deadline_exceeded"})
"""How a request with little time may end where nothing was broken before its end."""
WITHOUT_NODES = WITHOUT_FAULTS | {"overloaded"}
"""How one may end while all nodes that decode have left."""


class Ends:
    """How the requests of one history may end."""

    def __init__(self, history: History) -> None:
        shape = history.shape
        self._shape, self._times = shape, fault_times(history)
        changed = {fault.target for fault in history.faults if fault.kind in CHANGES}
        staying = set(node_names(shape)) - changed
        # By load, a decode node may prefill when the last other one leaves, and for a while.
        serving = (Role.MIXED,) if are_roles_by_load(shape) else (Role.DECODE, Role.MIXED)
        self._is_served = any(name.startswith(role.value) for name in staying for role in serving)
        is_whole = math.isinf(self._times.first_broken_s)
        self._is_still = not (changed or are_roles_by_load(shape)) and is_whole

    def check(self, asked: AskedRequest, answered: Answered, right: tuple[int, ...]) -> None:
        """Check how one request ended; `right` is its answer in an undisturbed run.

        Raises `Violation`.
        """
        shape, times = self._shape, self._times
        knows_all = self._is_still and asked.at_s >= HEARD_S
        may_refuse = refusals_of(shape) | refusals_of_grammar(asked.grammar)
        if may_be_too_long(shape, asked, is_still=knows_all):
            may_refuse |= {InvalidRequest.code}
            if not knows_all:  # the node that holds it has refused it or begun it, and left
                may_refuse |= {Overloaded.code, NodeLost.code}
        _check_end(
            *(asked, answered, right),
            has_faults=times.first_broken_s <= answered.ended_at_s,
            has_failed_steps=times.first_failing_s <= answered.ended_at_s,
            has_drains=times.first_drain_s <= answered.ended_at_s,
            is_served=self._is_served,
            may_refuse=may_refuse,
            fewest_tokens=fewest_tokens(shape, asked, is_still=knows_all),
        )

    def check_answered(
        self, asked: AskedRequest, answered: Answered, roles: Mapping[str, Role]
    ) -> None:
        """Check that a request with enough time after the last fault was answered in it.

        `roles` are those of the nodes that are there at the end, by name. Raises `Violation`.
        """
        outcome, faults_end_s = answered.outcome, self._times.end_s
        began_s = max(asked.at_s, faults_end_s)
        enough_s = max(ENOUGH_S, ENOUGH_STEPS * self._shape.step_s)
        has_time = asked.at_s + asked.deadline_s > began_s + enough_s
        is_late = outcome in (DeadlineExceeded.code, DeadlineUnreachable.code)
        num_wanted = tokens_wanted(asked, len(answered.tokens))
        can_decode = any(
            role is not Role.PREFILL and longest_of(self._shape, name) >= num_wanted
            for name, role in roles.items()
        )
        if is_late and has_time and can_decode:
            raise Violation(f"{asked.name} waited until its deadline, and nothing was in its way")
        is_healed = asked.at_s > faults_end_s + HEALED_S
        if is_healed and can_decode and outcome in OF_NODES:
            raise Violation(f"{asked.name} ended by {outcome}, long after the last fault")

    def check_roles(self, roles: Iterable[Role]) -> None:
        """Check that something decodes at the end where nothing is broken, no node leaves, and one
        router decides about roles: of two, each may move another node. Raises `Violation`.
        """
        is_whole = math.isinf(self._times.first_broken_s) and math.isinf(self._times.first_drain_s)
        is_lost = all(role is Role.PREFILL for role in roles)
        if is_whole and self._shape.num_routers == 1 and is_lost:
            raise Violation("the last node that decodes was given another role")


def _check_end(
    asked: AskedRequest,
    answered: Answered,
    right: tuple[int, ...],
    *,
    has_faults: bool,
    has_failed_steps: bool,
    has_drains: bool,
    is_served: bool,
    may_refuse: frozenset[str],
    fewest_tokens: int,
) -> None:
    """Check how one request ended; `right` is its answer in an undisturbed run.

    What is not broken fails nothing, whatever roles nodes have. A node that leaves may end an
    attempt, and the request goes on elsewhere; `is_served`: some node decodes whatever others do.
    Nodes that queue little, or are small, `may_refuse` a request; its router checks whether each
    could. An answer that is cut to what nodes hold has `fewest_tokens`.
    Raises `Violation`.
    """
    tokens, outcome = tuple(answered.tokens), answered.outcome
    if answered.failure and not (has_faults or has_drains):
        raise Violation(f"an attempt of {asked.name} failed by itself: {answered.failure}")
    if tokens and is_refused(asked.grammar):
        raise Violation(f"{asked.name} was answered {tokens} under a grammar that is refused")
    if tokens != right[: len(tokens)]:
        raise Violation(f"{asked.name} was answered {tokens}: right is {right}")
    if outcome in FINISHED:
        reason = "stop" if right[-1] == STOP_TOKEN_ID else "length"
        is_cut = outcome == "length" and fewest_tokens <= len(tokens) < len(right)
        if (tokens != right or outcome != reason) and not is_cut:
            raise Violation(f"{asked.name} ends by {outcome} after {tokens}: right is {right}")
        return
    if outcome == LEFT and asked.leaves_at_s is not None:
        return
    known = WITHOUT_FAULTS if is_served or not has_drains else WITHOUT_NODES
    if has_faults:
        known = BY_STEPS if has_failed_steps else BY_FAULTS
    if outcome not in known | may_refuse:
        raise Violation(f"{asked.name} ended by {outcome}")


def check_logprobs(asked: AskedRequest, answered: Answered, prompt: tuple[int, ...]) -> None:
    """Check that log probabilities came with the tokens that they are of, where they are wanted.

    Raises `Violation`.
    """
    text = (*prompt, *answered.tokens)
    right = logprobs_of(text, len(prompt)) if asked.has_logprobs else ()
    found = tuple(one.logprob for one in answered.logprobs)
    if found != right:
        raise Violation(f"{asked.name} was answered log probabilities {found}: right is {right}")
    wants_all = asked.has_prompt_logprobs and answered.tokens and len(prompt) > 1
    of_prompt = [logprobs_of(prompt, 1)] if wants_all else []
    if [one.logprobs for one in answered.prompt_logprobs] != of_prompt:
        raise Violation(f"{asked.name} was answered other log probabilities of its prompt")


def check_time(asked: AskedRequest, answered: Answered, slack_s: float) -> None:
    """Check that a request ended by its deadline; `slack_s`: how long its router stood still.

    Raises `Violation`.
    """
    late_s = answered.ended_at_s - asked.at_s - asked.deadline_s
    if late_s > LATE_S + slack_s:
        raise Violation(f"{asked.name} ended {late_s:.3f} s after its deadline")
