"""What a request flow does on its events: it asks nodes, gives up attempts, and ends."""

from __future__ import annotations

from dataclasses import replace

from common.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PeerProtocolError,
    StaleEpoch,
)
from common.ids import Incarnation
from common.kv.prompt_blocks import PromptBlocks
from common.request import GenerationRequest, SamplingParams
from router.core.attempts import Attempt, Attempts, State
from router.core.candidates import WAIT_S, Candidates
from router.core.effects import Accepted, Choose, Effect, Fail, Finish, Wait
from router.core.token_ledger import TokenLedger

_MIN_DEADLINE_S = 0.001


class FlowActions:
    """The attempts of a choice and the nodes that can take it; effects are collected in `_out`."""

    def __init__(
        self,
        choice_id: str,
        prompt: PromptBlocks,
        sampling: SamplingParams,
        *,
        deadline_at_s: float,
        priority: int = 0,
        cache_salt: str = "",
        is_cut_to_fit: bool = False,
    ) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._deadline_at_s = deadline_at_s
        self._priority = priority
        self._cache_salt = cache_salt
        self._is_cut_to_fit = is_cut_to_fit
        self._attempts = Attempts(choice_id, TokenLedger(sampling, len(prompt.token_ids)))
        self._choosing: Attempt | None = None
        self._candidates = Candidates()
        self._is_accepted = False
        self._out: list[Effect] = []

    @property
    def _main(self) -> Attempt:
        return self._attempts.main

    def _accept(self) -> None:
        if not self._is_accepted:
            self._is_accepted = True
            self._out.append(Accepted())

    # Asking nodes.

    def _choose(self, attempt: Attempt) -> None:
        """Ask for nodes: where the decode node is reserved, for a prefill node alone."""
        if self._candidates.has_lost_too_many:
            self._wait_or_fail(attempt, Overloaded("its nodes were lost"))
            return
        self._choosing, attempt.state = attempt, State.CHOOSING
        reserved = None if attempt.ticket is None else attempt.decode
        self._out.append(Choose(reserved, self._excluded_for(attempt), self._attempts.layout))

    def _excluded_for(self, attempt: Attempt) -> frozenset[Incarnation]:
        suspects = () if attempt.asks_suspects else self._attempts.suspects.keys()
        return self._candidates.excluded.union(suspects)

    def _asks_others(self, attempt: Attempt) -> bool:
        """Return whether there are nodes to ask although each that may have room was asked: full
        ones, to queue the request, and then suspected ones, which may not answer for long.

        A second attempt asks no suspected node, and a full one only while the first waits for its
        first word. One that is begun again asks nodes again that refused the one before.
        """
        is_second = self._is_second(attempt)
        may_queue = not is_second or self._attempts.is_unanswered
        if may_queue and self._candidates.asks_to_queue():
            return True
        if attempt.asks_one and self._candidates.forgive():
            return True
        if is_second or attempt.asks_suspects or not self._attempts.suspects:
            return False
        attempt.asks_suspects = True
        return True

    def _choose_again(self) -> None:
        """After a wait: a node that refused an attempt is asked for another one."""
        if self._main.has_asked:
            self._out += self._attempts.restart()
        self._main.asks_suspects = False
        self._choose(self._main)

    def _ask_beside_again(self) -> None:
        """After a wait: begin another second attempt, unless too many have failed. It asks one
        node: where all of many are full, an answer asks one a second, and not all of them."""
        if self._candidates.may_try_beside:
            self._ask_new_node()
            if self._attempts.second is not None:
                self._attempts.second.asks_one = True

    def _ask_new_node(self) -> None:
        """Ask for nodes where a request waits for one, or is held up by a suspected one."""
        if self._main.state is State.WAITING:
            self._choose_again()
        elif self._attempts.second is None and self._attempts.is_held_up(self._main):
            self._choose(self._attempts.begin_second())

    def _wait_beside(self) -> None:
        """Ask other nodes after a while, if a suspected node holds the request up and no other
        attempt runs: they may have room long before that node is heard or lost."""
        if self._attempts.second is None and self._attempts.is_held_up(self._main):
            self._out.append(Wait(WAIT_S))

    def _is_cut(self, attempt: Attempt, longest: int) -> bool:
        """Cut an attempt to what the longest node holds, if that leaves another token; one of two
        to no less than the other one has. The next attempt begins with the whole length again."""
        num_left, main = longest - len(self._prompt.token_ids), self._main.ledger
        fewest = max(main.num_emitted + 1, self._sampling.min_tokens)
        if self._is_second(attempt):
            fewest = main.max_tokens
        is_cut = self._is_cut_to_fit and fewest <= num_left < attempt.ledger.max_tokens
        if is_cut:
            attempt.ledger.max_tokens = num_left
        return is_cut

    def _wait_or_fail(self, attempt: Attempt, error: PdserveError) -> None:
        self._candidates.on_none(error)
        if self._is_second(attempt):
            self._drop(attempt)
        elif self._candidates.can_wait(self._main.ledger.num_emitted):
            self._main.state = State.WAITING
            self._out.append(Wait(WAIT_S))
        else:
            self._fail(self._candidates.why_none(error))

    def _send_reserve(
        self,
        attempt: Attempt,
        decode: Incarnation,
        planned_prefill: Incarnation | None,
        now_s: float,
    ) -> None:
        request = self._request(attempt, now_s)
        self._out.append(
            attempt.reserve(decode, planned_prefill, request, may_wait=self._candidates.may_queue)
        )

    def _send_prefill(self, attempt: Attempt, prefill: Incarnation, now_s: float) -> None:
        self._out += attempt.send_prefill(prefill, self._request(attempt, now_s))

    def _fall_back_to_local(self, attempt: Attempt, now_s: float) -> None:
        decode = attempt.decode
        if decode is None:
            self._give_up(attempt, self._candidates.overloaded("every prefill node refused", 1.0))
            return
        if self._is_second(attempt):
            self._out += self._attempts.drop(attempt)
            again = self._attempts.begin_second()
            again.asks_one = attempt.asks_one
        else:
            self._out += self._attempts.restart()
            again = self._main
        again.reason = "local prefill: no prefill node took it"
        self._send_reserve(again, decode, None, now_s)

    def _on_refusal(self, attempt: Attempt, node: Incarnation, error: PdserveError) -> None:
        can_queue = node == attempt.decode and not attempt.may_wait
        # A prefill node of an earlier version does not continue answers.
        is_unable = node == attempt.prefill and attempt.ledger.num_before > 0
        self._out.append(attempt.close_leg(node))
        if attempt.decode is None:
            self._out += attempt.drop_plan()
        is_prompt = node != attempt.decode
        self._candidates.on_refusal(node, error, can_queue=can_queue, is_prompt=is_prompt)
        if isinstance(error, (InvalidRequest, DeadlineExceeded)) and not is_unable:
            self._give_up(attempt, error)
        elif attempt.ledger.num_emitted > attempt.ledger.num_before:
            self._fail(PeerProtocolError(f"{node} refused what it had answered: {error}"))
        elif attempt.asks_one or (attempt is self._main and self._attempts.second is not None):
            self._drop(attempt)
        else:
            self._choose(attempt)

    def _request(self, attempt: Attempt, now_s: float) -> GenerationRequest:
        return GenerationRequest(
            id=attempt.id,
            prompt_token_ids=self._prompt.token_ids,
            sampling=self._sampling_of(attempt.ledger),
            deadline_s=max(_MIN_DEADLINE_S, self._deadline_at_s - now_s),
            priority=self._priority,
            output_token_ids=tuple(attempt.ledger.emitted),
            cache_salt=self._cache_salt,
            known_blocks=self._prompt,
        )

    def _sampling_of(self, ledger: TokenLedger) -> SamplingParams:
        """Return what is asked of an attempt: log probabilities of the prompt came with token 0."""
        sampling = self._sampling
        scored = None if ledger.num_emitted else sampling.prompt_logprobs
        if (ledger.max_tokens, scored) == (sampling.max_tokens, sampling.prompt_logprobs):
            return sampling
        return replace(sampling, max_tokens=ledger.max_tokens, prompt_logprobs=scored)

    # Beginnings and endings.

    def _is_second(self, attempt: Attempt) -> bool:
        return attempt is self._attempts.second

    def _attempt_failed(self, attempt: Attempt, error: PdserveError, suspect: Incarnation) -> None:
        num_emitted = attempt.ledger.num_emitted
        self._candidates.on_failure(suspect, error, num_emitted)
        is_final = num_emitted > 0 and not _can_continue(error)
        if self._is_second(attempt):
            self._drop(attempt)
        elif is_final:
            self._fail(error)
        elif self._attempts.second is not None:
            self._drop(attempt)
        elif self._candidates.has_failed_too_often:
            self._fail(error)
        else:
            self._out += self._attempts.restart()
            self._choose(self._main)

    def _give_up(self, attempt: Attempt, error: PdserveError) -> None:
        """End what cannot go on: a second attempt alone, or else the request."""
        if self._is_second(attempt):
            self._drop(attempt)
        else:
            self._fail(error)

    def _drop(self, attempt: Attempt) -> None:
        """End one of two attempts; the other one goes on alone."""
        self._out += self._attempts.drop(attempt)
        self._main.asks_one = False
        self._wait_beside()

    def _fail(self, error: PdserveError) -> None:
        self._end(Fail(error))

    def _end(self, outcome: Finish | Fail) -> None:
        self._choosing = None
        self._out += self._attempts.end()
        self._out.append(outcome)

    def _take_effects(self) -> list[Effect]:
        effects, self._out = self._out, []
        return effects


def _can_continue(error: PdserveError) -> bool:
    """Return whether another node may continue after what was emitted before this error."""
    is_the_nodes = isinstance(error, (NodeLost, HandoffFailed, Overloaded, StaleEpoch))
    return is_the_nodes and not isinstance(error, PeerProtocolError)
