"""A prefill node without a network: real flow, loop and runner, and a connector that keeps what it
is given at the moment it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.ids import AttemptId, Incarnation
from common.kv.blocks import blocks_for
from common.request import GenerationRequest, SamplingParams
from common.settings.config import SpeculationConfig
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import StepCosts
from engine.core.scheduler import Scheduler
from engine.core.speculation.speculation import make_speculation
from engine.runner.model_runner import ModelRunner
from engine.step_loop import StepLoop
from kv_transfer.contract import Commit, Ticket, TransferEnded
from node.flow.flow_limits import FlowLimits
from node.flow.inbox import Inbox
from node.flow.landing_place import LandingPlace, Tickets
from node.flow.messages import Effect, Message, Submit
from node.flow.node_flow import NodeFlow
from node.flow.perform_effects import NodeEffects
from node.flow.pulls.pull_cost import PullCost
from tests.support.clocks.manual_clock import ManualClock

ROUTER = Incarnation("r", 1)
Piece = tuple[int, int]
"""Layer and ordinal."""


class KeepingConnector:
    """The sending half of a `KVConnector`: copies every piece out of `pool` when it is pushed."""

    def __init__(self, pool: np.ndarray) -> None:
        self.pool = pool
        self.tickets: dict[int, Ticket] = {}
        self.pieces: dict[int, dict[Piece, np.ndarray]] = {}
        self.source_blocks: dict[int, dict[Piece, int]] = {}
        self.pushes: list[tuple[int, int, int]] = []
        """Lease, layer and number of blocks of each push, since somebody emptied the list."""
        self.commits: dict[int, Commit] = {}
        self.aborted: list[int] = []

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        self.tickets[ticket.lease_token] = ticket
        self.pieces[ticket.lease_token] = {}
        self.source_blocks[ticket.lease_token] = {}

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        assert lease_token not in self.commits, "a push behind the commit"
        self.pushes.append((lease_token, layer, len(ordinals)))
        for ordinal, block in zip(ordinals, source_blocks, strict=True):
            assert (layer, ordinal) not in self.pieces[lease_token], "pushed twice"
            self.pieces[lease_token][layer, ordinal] = self.pool[layer, :, block].copy()
            self.source_blocks[lease_token][layer, ordinal] = block

    def commit(self, lease_token: int, commit: Commit) -> None:
        self.commits[lease_token] = commit

    def abort(self, lease_token: int) -> None:
        self.aborted.append(lease_token)


class PrefillNode:
    """`budget` tokens a step; prompts are put in with `ask` and computed with `turn`."""

    def __init__(self, runner: ModelRunner, *, budget: int, num_drafts: int = 0) -> None:
        self.runner = runner
        self.connector = KeepingConnector(runner.kv_bytes)
        self.inbox = Inbox(max_requests=100)
        method = "mtp" if num_drafts else "none"
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=4,
                max_num_batched_tokens=budget,
                block_size=runner.layout.block_size,
                max_model_len=runner.max_model_len,
                num_speculative_tokens=num_drafts,
            ),
            num_blocks=runner.num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=frozenset(),
            speculation=make_speculation(
                SpeculationConfig(speculative_method=method, num_speculative_tokens=num_drafts),
                StepCosts((1, 65), (1.0, 1.064)),
            ),
        )
        limits = FlowLimits(
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            max_queued_requests=100,
        )
        place = LandingPlace(
            node=Incarnation("prefill", 1),
            kv_endpoint="none",
            fingerprint=runner.layout.fingerprint,
            kv_description="",
            layer_bytes=tuple(one.num_bytes for one in runner.layout.layers),
            lease_s=60.0,
        )
        flow = NodeFlow(
            self.scheduler,
            limits,
            tickets=Tickets(place, lambda: 1),
            needs_staging=runner.needs_staging,
            local_prefill_threshold=0,
            pull_cost=PullCost(1.0, lambda num_tokens: 0.0),
        )
        nobody: Any = self
        keeping: Any = self.connector
        self.loop: StepLoop[Message, Effect] = StepLoop(
            inbox=self.inbox,
            flow=flow,
            runner=runner,
            perform=NodeEffects(
                keeping,
                nobody,
                nobody,
                runner,
                on_drained=lambda: None,
                on_copied=self.inbox.put,
            ).perform_effect,
            flush=lambda: None,
            clock=ManualClock(),
        )

    def resolve(self, reply_to: int, answer: object) -> None:
        """Do nothing: the tests do not read answers."""

    def add(self, sent: object) -> None:
        """Do nothing: the tests do not read outputs."""

    def ask(self, lease_token: int, prompt: Sequence[int], num_cached_tokens: int = 0) -> None:
        """Submit a prompt whose first `num_cached_tokens` the decode node has."""
        attempt = AttemptId(f"r{lease_token}", 1)
        size = self.runner.layout.block_size
        num_blocks = blocks_for(len(prompt), size) - num_cached_tokens // size
        ticket = Ticket(
            attempt=attempt,
            decode_node=Incarnation("d", 1),
            kv_endpoint="nowhere",
            lease_token=lease_token,
            generation=1,
            target_block_ids=tuple(range(num_blocks)),
            num_cached_tokens=num_cached_tokens,
            fingerprint=self.runner.layout.fingerprint,
            lease_s=60.0,
        )
        request = GenerationRequest(
            id=attempt,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
            deadline_s=60.0,
        )
        self.inbox.put(
            Submit(
                request=request,
                router=ROUTER,
                reply_to=1,
                received_at_s=0.0,
                is_prompt=True,
                ticket=ticket,
            )
        )

    def end(self, lease_token: int) -> None:
        """End the transfer: it was acknowledged, or aborted."""
        self.inbox.put(TransferEnded(lease_token, None))
        self.loop.turn()
