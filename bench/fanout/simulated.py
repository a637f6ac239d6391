"""The prefill node's machine alone, with the decode nodes' machines and no network."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from bench.fanout.decode_machine import LIMITS, DecodeMachine
from bench.fanout.workload import BLOCKS, COMMIT, DEADLINE_S, LAYOUT
from common.ids import Incarnation
from kv_transfer.contract import TransferEnded
from kv_transfer.sending.effects import SayHello, SendChunk, SenderEffect, SendToPeer
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.wire import frames

_SESSION = b"prefill"
_LANE = "zmq"


class SimulatedFanout:
    """Machines of one prefill node and of so many decode nodes, on a virtual clock.

    `sender_cpu_s` is the CPU time of the prefill node's machine; frames are neither encoded nor
    sent, and no bytes move.
    """

    def __init__(self, num_ends: int) -> None:
        self.sender_cpu_s = 0.0
        self.now_s = 0.0
        self._sender = Sender(Incarnation("prefill", 1), LAYOUT, LIMITS)
        self._tokens = itertools.count(1)
        self._ended: list[TransferEnded] = []
        ends = (DecodeMachine(n, f"decode-{n}", _LANE, 1) for n in range(num_ends))
        self.ends = {Peer(end.endpoint, end.incarnation): end for end in ends}

    def hand_off(self, num_handoffs: int) -> float:
        """Return the CPU seconds of the sender for handoffs to one node after the other.

        Raises `RuntimeError` when one failed.
        """
        began_s = self.sender_cpu_s
        ends = itertools.cycle(self.ends.values())
        for token, end in zip(itertools.islice(self._tokens, num_handoffs), ends, strict=False):
            ticket = end.reserve(token, self.now_s)
            self._act(self._sender.on_open, ticket, DEADLINE_S, self.now_s)
            for layer in range(LAYOUT.num_layers):
                self._act(self._sender.on_push, token, layer, BLOCKS, BLOCKS)
            self._act(self._sender.on_commit, token, COMMIT)
            self._turn()
            if self._ended.pop().error is not None or self._ended:
                raise RuntimeError(f"handoff {token} did not end as it should")
        return self.sender_cpu_s - began_s

    def idle(self, span_s: float) -> float:
        """Return the share of a core that the sender takes in so many seconds without handoffs."""
        began_s, until_s = self.sender_cpu_s, self.now_s + span_s
        while (due_s := self._sender.next_deadline_s()) is not None and due_s < until_s:
            self.now_s = max(self.now_s, due_s)
            self._turn()
        self.now_s = until_s
        return (self.sender_cpu_s - began_s) / span_s

    def _turn(self) -> None:
        self._act(self._sender.on_tick, self.now_s)
        self._act(self._sender.next_deadline_s)

    def _act(self, act: Callable[..., Any], *arguments: Any) -> None:
        """Call the sender, then deliver frames until there are none."""
        todo = self._timed(act, *arguments)
        while todo:
            effect = todo.popleft()
            if isinstance(effect, Emit) and isinstance(effect.event, TransferEnded):
                self._ended.append(effect.event)
            elif isinstance(effect, SayHello | SendToPeer | SendChunk):
                frame, end = self._frame(effect), self.ends[effect.peer]
                for answer in end.answers(_SESSION, frame, _part_sizes(frame), self.now_s):
                    todo += self._timed(self._sender.on_frame, effect.peer, answer, self.now_s)

    def _timed(self, act: Callable[..., Any], *arguments: Any) -> deque[SenderEffect]:
        began_s = time.thread_time()
        result = act(*arguments)
        self.sender_cpu_s += time.thread_time() - began_s
        return deque(result if isinstance(result, Iterable) else ())

    def _frame(self, effect: SayHello | SendToPeer | SendChunk) -> frames.Frame:
        match effect:
            case SayHello(peer):
                return self._sender.hello(peer, {_LANE: b""}, "auto")
            case SendToPeer(_, frame):
                return frame
            case SendChunk(_, seq, token, generation, chunk, wants_ack=wants_ack):
                ordinals = tuple(chunk.ordinals.tolist())
                sums = bytes(len(ordinals) * LAYOUT.num_planes * frames.SUM_BYTES)
                runs = (len(ordinals),)
                return frames.Data(
                    seq, token, generation, chunk.layer, ordinals, runs, (), sums, wants_ack
                )


def _part_sizes(frame: frames.Frame) -> list[int]:
    runs = frame.runs if isinstance(frame, frames.Data) else ()
    return [count * LAYOUT.piece_bytes for count in runs for _ in range(LAYOUT.num_planes)]
