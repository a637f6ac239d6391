"""The prefill node's process: its real step loop, flow and connector, without its gRPC server."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from bench.handoff.cpu_time import process_cpu_s, transfer_threads_cpu_s
from bench.handoff.paced_runner import LAYOUT_8B, PacedRunner
from common.ids import AttemptId, Incarnation, new_lease_token
from common.kv.blocks import blocks_for
from common.kv.kv_layout import KVLayout
from common.nodes import Role
from common.observing.clock import MonotonicClock
from common.request import GenerationRequest, RequestOutput, SamplingParams
from common.settings.config import Config, EngineConfig, HandoffConfig, ModelConfig
from kv_transfer.contract import Commit, ConnectorEvent, Ticket, TransferEnded
from kv_transfer.transfer_timing import TransferTiming
from node.control.output_streams import OutputStreams
from node.control.router_calls import Replies
from node.flow.inbox import Inbox
from node.flow.messages import Answer, CallRefused, SendOutput, Submit
from node.flow.perform_effects import NodeEffects
from node.life.make_flow import flow_maker
from node.life.make_scheduler import make_scheduler
from node.life.node_parts import LoadedModel, NodeConnector
from node.life.step_thread import StepThread
from pdserve.checkpoints.resolve import resolve_checkpoint
from pdserve.roles.kv_plane import KVPlane

PROMPT_TOKENS = 2048
CHUNK_TOKENS = 512
DEADLINE_S = 120.0
_ROUTER = Incarnation("bench", 1)
_SPARE_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The measured case: `layout` as in `--layout`, `transport` as in `--kv-transport`."""

    layout: str
    transport: str
    tokens_per_s: float
    kv_verify: str = "auto"
    prompt_tokens: int = PROMPT_TOKENS

    def config(self, role: Role) -> Config:
        """Return a node's configuration, with one prompt at a time in chunks of `CHUNK_TOKENS`."""
        return Config(
            role=role,
            model=ModelConfig(model="demo"),
            engine=EngineConfig(
                max_num_batched_tokens=CHUNK_TOKENS,
                kv_cache_memory=256 << 20,
                kv_cache_dtype="int8" if self.layout == "demo_int8" else "auto",
                max_num_seqs=8,
            ),
            handoff=HandoffConfig(kv_transport=self.transport, kv_verify=self.kv_verify),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """One computed and transferred prompt. `cpu_s` is the time spent on the transfer."""

    timing: TransferTiming
    ttft_s: float
    cpu_s: float


class _TimedConnector:
    """The connector as the step thread uses it; measures the CPU time spent in it."""

    def __init__(self, connector: NodeConnector) -> None:
        self._connector = connector
        self.cpu_s = 0.0

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        began_s = time.thread_time()
        self._connector.open(ticket, deadline_s=deadline_s, priority=priority)
        self.cpu_s += time.thread_time() - began_s

    def push(self, lease_token: int, **what: Any) -> None:
        began_s = time.thread_time()
        self._connector.push(lease_token, **what)
        self.cpu_s += time.thread_time() - began_s

    def commit(self, lease_token: int, commit: Commit) -> None:
        began_s = time.thread_time()
        self._connector.commit(lease_token, commit)
        self.cpu_s += time.thread_time() - began_s


class _Answers:
    """Receives the node's messages to its router, with their times."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[tuple[RequestOutput | Answer, float]] = queue.SimpleQueue()

    def add(self, sent: SendOutput) -> None:
        self.outputs.put((sent.output, time.monotonic()))

    def resolve(self, reply_to: int, answer: Answer) -> None:
        if isinstance(answer, CallRefused):
            self.outputs.put((answer, time.monotonic()))


class PrefillEnd:
    """A prefill node that is driven by method calls."""

    def __init__(self, case: Case) -> None:
        config = case.config(Role.PREFILL)
        self._prompt_tokens = case.prompt_tokens
        self._is_paced = case.layout == "synthetic_8b"
        kv = KVPlane(config)
        self._runner = _paced(case, kv) if self._is_paced else _demo_model(config, kv)
        self._runner.warm_up()
        self._inbox = Inbox(max_requests=8)
        self._ended: queue.SimpleQueue[TransferEnded] = queue.SimpleQueue()
        self._burden: set[int] = set()
        me = Incarnation("prefill", 1)
        self._connector = kv.connect(self._runner, me, self._on_event)
        self._timed = _TimedConnector(self._connector)
        self._answers = _Answers()
        scheduler = make_scheduler(config, self._runner)
        make = flow_maker(config)
        flow = make(scheduler, self._runner, me, self._connector, new_lease_token)
        self._step_thread = StepThread(
            inbox=self._inbox,
            flow=flow,
            runner=self._runner,
            perform=NodeEffects(
                cast(NodeConnector, self._timed),
                cast(Replies, self._answers),
                cast(OutputStreams, self._answers),
                self._runner,
                on_drained=lambda: None,
                on_copied=self._inbox.put,
            ).perform_effect,
            flush=lambda: None,
            on_crash=lambda: None,
            clock=MonotonicClock(),
        )

    @property
    def layout(self) -> KVLayout:
        return self._runner.layout

    def prefill(self, ticket: Ticket, number: int) -> Prefilled:
        """Compute prompt `number` and hand it off; return when its commit was acknowledged.

        Raises `RuntimeError` when computing or transferring failed.
        """
        request = GenerationRequest(
            id=ticket.attempt,
            prompt_token_ids=_prompt(number, self._prompt_tokens),
            sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            deadline_s=DEADLINE_S,
        )
        cpu_before_s, submitted_at_s = self._cpu_s(), time.monotonic()
        self._inbox.put(
            Submit(
                request=request,
                router=_ROUTER,
                reply_to=number,
                received_at_s=submitted_at_s,
                is_prompt=True,
                ticket=ticket,
            )
        )
        answer, answered_at_s = self._answers.outputs.get(timeout=DEADLINE_S)
        if not isinstance(answer, RequestOutput) or not answer.token_ids:
            raise RuntimeError(f"the prompt was not computed: {answer}")
        ended = self._ended.get(timeout=DEADLINE_S)
        timing = cast(Any, self._connector).last_committed
        if ended.error is not None or timing is None:
            raise RuntimeError(f"the transfer failed: {ended.error}")
        return Prefilled(
            timing=timing,
            ttft_s=answered_at_s - submitted_at_s,
            cpu_s=self._cpu_s() - cpu_before_s,
        )

    def burden(self, tickets: Sequence[Ticket]) -> None:
        """Send to nodes that take it slowly; these transfers are never committed."""
        for ticket in tickets:
            self._burden.add(ticket.lease_token)
            self._connector.open(ticket, deadline_s=3600.0)
            blocks = range(len(ticket.target_block_ids))
            for layer in range(self.layout.num_layers):
                self._connector.push(
                    ticket.lease_token, layer=layer, ordinals=blocks, source_blocks=blocks
                )

    def close(self) -> None:
        self._inbox.close()
        self._connector.close()

    def _cpu_s(self) -> float:
        if self._is_paced:
            return process_cpu_s()
        return transfer_threads_cpu_s() + self._timed.cpu_s

    def _on_event(self, event: ConnectorEvent) -> None:
        if isinstance(event, TransferEnded) and event.lease_token in self._burden:
            return
        self._inbox.put(event)
        if isinstance(event, TransferEnded):
            self._ended.put(event)


def ticket_for(
    number: int, layout: KVLayout, num_blocks: int, node: Incarnation, endpoint: str
) -> Ticket:
    """Return what a decode node reserves for prompt `number`, with nothing cached."""
    return Ticket(
        attempt=AttemptId(f"bench-{number}", 1),
        decode_node=node,
        kv_endpoint=endpoint,
        lease_token=number + 1,
        generation=1,
        target_block_ids=tuple(range(num_blocks)),
        num_cached_tokens=0,
        fingerprint=layout.fingerprint,
        lease_s=DEADLINE_S,
    )


def _prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    """Return tokens that no other prompt has, so that the prefix cache finds nothing."""
    return tuple((7919 * (i + 1) + 104_729 * (number + 1)) % 30_000 + 3 for i in range(num_tokens))


def _paced(case: Case, kv: KVPlane) -> LoadedModel:
    num_blocks = blocks_for(case.prompt_tokens, LAYOUT_8B.block_size) + _SPARE_BLOCKS
    return PacedRunner(
        tokens_per_s=case.tokens_per_s, num_blocks=num_blocks, host_memory=kv.host_memory
    )


def _demo_model(config: Config, kv: KVPlane) -> LoadedModel:
    from engine.runner.start.load import load_model_runner

    folder = str(resolve_checkpoint(config.model.model))
    runner = load_model_runner(
        ModelConfig(model=folder),
        config.engine,
        max_chunk_tokens=CHUNK_TOKENS,
        host_memory=kv.host_memory,
    )
    return cast(LoadedModel, runner)
