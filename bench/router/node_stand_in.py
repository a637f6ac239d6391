"""A prefill and a decode node that answer at once, so that only the router takes time.

They use the real protocol over real gRPC and hand off prompts like nodes: a ticket, token 0 from
the prefill node, then the rest from the decode node with one output for each token, all outputs
that wait for the router in one message. Their answers are pieces of an English text in the model's
tokens, so that turning tokens into text has its real cost.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast

import grpc.aio
import uvloop

from common.ids import AttemptId
from common.nodes import NodeLoad, NodeRecord, Role
from common.request import NO_DETAILS, FinishReason, OutputDetails, RequestOutput
from placement.redis_store import RedisStore
from protos import pdserve_node_pb2 as pb
from protos.output_batches import outputs_to_proto
from protos.pdserve_node_pb2_grpc import NodeServicer, add_NodeServicer_to_server

CLUSTER = "bench_router"
NUM_ANSWERS = 64
LEASE_S = 86_400.0
_HEARTBEAT_S = 0.25
_FINGERPRINT = "f" * 32
_IDLE = NodeLoad(
    free_blocks=1 << 20, free_seats=1 << 12, num_running=0, num_waiting=0, queued_tokens=0
)
_LAST = OutputDetails(finish_reason=FinishReason.LENGTH)


def answers(token_ids: Sequence[int], num_tokens: int) -> list[list[int]]:
    """Return overlapping pieces of a text, `num_tokens` each, which requests use in turn.

    Raises `ValueError` for a text that is too short.
    """
    pieces = [list(token_ids[7 * i : 7 * i + num_tokens]) for i in range(NUM_ANSWERS)]
    if len(pieces[-1]) < num_tokens:
        raise ValueError(f"a text of {len(token_ids)} tokens is too short for {num_tokens}")
    return pieces


class _Stream:
    """One node's outputs for its router, in the order of its steps."""

    def __init__(self) -> None:
        self._replies: list[pb.Reply] = []
        self._outputs: list[RequestOutput] = []
        self._when_sent: list[Callable[[], None]] = []
        self._has_news = asyncio.Event()

    def reply(self, reply: pb.Reply) -> None:
        self._replies.append(reply)
        self._has_news.set()

    def add(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._has_news.set()

    def call_when_sent(self, call: Callable[[], None]) -> None:
        """Call `call` when everything added so far was sent."""
        self._when_sent.append(call)

    async def messages(self) -> AsyncIterator[pb.NodeMessage]:
        yield pb.NodeMessage()
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            self._has_news.clear()
            replies, self._replies = self._replies, []
            outputs, self._outputs = self._outputs, []
            when_sent, self._when_sent = self._when_sent, []
            yield pb.NodeMessage(replies=replies, outputs=outputs_to_proto(outputs))
            for call in when_sent:
                call()


@dataclass(slots=True)
class _Running:
    attempt: AttemptId
    token_ids: list[int]
    num_sent: int = 1


class _Pair(cast(Any, NodeServicer)):  # type: ignore[misc]
    """The service of both nodes; each has a port and a stream of its own."""

    def __init__(self, pieces: list[list[int]], step_s: float) -> None:
        self._pieces = pieces
        self._turns = count()
        self._step_s = step_s
        self._running: dict[AttemptId, _Running] = {}
        self._prefill, self._decode = _Stream(), _Stream()

    async def Stream(  # noqa: N802
        self, messages: AsyncIterator[pb.RouterMessage], _context: object
    ) -> AsyncIterator[pb.NodeMessage]:
        greeting = await anext(messages)
        is_prefill = greeting.envelope.receiver_id == "prefill"
        listening = asyncio.create_task(self._listen(messages))
        try:
            async for message in (self._prefill if is_prefill else self._decode).messages():
                yield message
        finally:
            listening.cancel()

    async def _listen(self, messages: AsyncIterator[pb.RouterMessage]) -> None:
        async for message in messages:
            for call in message.calls:
                if call.WhichOneof("ask") == "reserve":
                    self._decode.reply(_ticket(call.id))
                else:
                    self._take_prompt(call)
            for choice_id, attempt in zip(
                message.aborts.request_ids, message.aborts.attempts, strict=True
            ):
                self._running.pop(AttemptId(choice_id, attempt), None)

    def _take_prompt(self, call: pb.Call) -> None:
        asked = call.prefill.request
        attempt = AttemptId(asked.request_id, asked.attempt)
        piece = self._pieces[next(self._turns) % len(self._pieces)]
        running = _Running(attempt, piece[: asked.sampling.max_tokens])
        self._prefill.reply(pb.Reply(call_id=call.id, accepted=pb.Accepted()))
        self._prefill.add(RequestOutput(attempt, 0, tuple(running.token_ids[:1])))
        self._prefill.call_when_sent(partial(self._start_decode, running))

    def _start_decode(self, running: _Running) -> None:
        self._running[running.attempt] = running
        if not self._step_s:
            while running.attempt in self._running:
                self._step(running)

    async def run_steps(self) -> None:
        """Run paced steps, each of which gives every running sequence its next token."""
        loop = asyncio.get_running_loop()
        next_at_s = loop.time()
        while True:
            next_at_s = max(next_at_s + self._step_s, loop.time())
            await asyncio.sleep(next_at_s - loop.time())
            for running in list(self._running.values()):
                self._step(running)

    def _step(self, running: _Running) -> None:
        place = running.num_sent
        running.num_sent += 1
        is_last = running.num_sent >= len(running.token_ids)
        if is_last:
            del self._running[running.attempt]
        self._decode.add(
            RequestOutput(
                running.attempt,
                place,
                tuple(running.token_ids[place : place + 1]),
                is_started=True,
                details=_LAST if is_last else NO_DETAILS,
            )
        )


def _ticket(call_id: int) -> pb.Reply:
    ticket = pb.Ticket(
        decode_node_id="decode",
        decode_epoch=1,
        kv_endpoint="tcp://127.0.0.1:1",
        lease_token=7,
        generation=1,
        target_block_ids=[1, 2],
        fingerprint=_FINGERPRINT,
        lease_ms=30_000,
    )
    return pb.Reply(call_id=call_id, ticket=ticket)


class NodeStandIn:
    """Runs both nodes on one core, in a process of its own."""

    def __init__(
        self, core: int, redis_url: str, model: str, pieces: list[list[int]], step_s: float
    ) -> None:
        """Start the nodes; `step_s` is the time between two tokens; 0: all of them at once."""
        os.sched_setaffinity(0, {core})
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._start(redis_url, model, pieces, step_s))

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(
        self, redis_url: str, model: str, pieces: list[list[int]], step_s: float
    ) -> None:
        pair = _Pair(pieces, step_s)
        self._servers = []
        self._steps = asyncio.create_task(pair.run_steps()) if step_s else None
        store = RedisStore(redis_url, CLUSTER, call_timeout_s=10.0)
        for role in (Role.PREFILL, Role.DECODE):
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            cast(Any, add_NodeServicer_to_server)(pair, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            self._servers.append(server)
            await store.heartbeat(node_record(role, port, model), _IDLE, lease_s=LEASE_S)
        await store.close()

    async def _stop(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
        for server in self._servers:
            await server.stop(grace=0)


def node_record(role: Role, port: int, model: str) -> NodeRecord:
    """Return the record of the node of this role."""
    return NodeRecord(
        node_id=role.value,
        epoch=1,
        role=role,
        control_address=f"127.0.0.1:{port}",
        model=model,
        fingerprint=_FINGERPRINT,
        block_size=64,
        num_blocks=1 << 20,
        max_num_seqs=1 << 12,
        max_model_len=2048,
    )
