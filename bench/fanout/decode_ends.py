"""The machines of many decode nodes on real sockets, in one process with one thread for them."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import zmq

from bench.fanout.decode_machine import DecodeMachine
from bench.fanout.workload import DEADLINE_S
from kv_transfer.contract import Ticket
from kv_transfer.wire import frames

_POLL_MS = 50


class DecodeEnds:
    """The receiving machines; each has room for its share of `num_handoffs` at once."""

    def __init__(self, num_ends: int, num_handoffs: int) -> None:
        self._num_handoffs = num_handoffs
        self._tokens = itertools.count(1)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, num_ends + 1)
        self._ends: dict[zmq.Socket[Any], DecodeMachine] = {}
        for number in range(num_ends):
            router = self._context.socket(zmq.ROUTER)
            router.bind("tcp://127.0.0.1:*")
            endpoint = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
            each = -(-num_handoffs // num_ends)
            self._ends[router] = DecodeMachine(number, endpoint, "zmq", each)
        self._lock = threading.Lock()
        self._is_closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def reserve(self) -> list[Ticket]:
        """Open the landings of a round, one node after the other in turn; return their tickets."""
        ends = itertools.cycle(self._ends.values())
        with self._lock:
            return [
                end.reserve(next(self._tokens), time.monotonic())
                for _, end in zip(range(self._num_handoffs), ends, strict=False)
            ]

    def check_landed(self, num_handoffs: int) -> None:
        """Raise `RuntimeError` unless so many handoffs have landed since the start."""
        with self._lock:
            num_landed = sum(end.num_landed for end in self._ends.values())
        if num_landed != num_handoffs:
            raise RuntimeError(f"{num_landed} handoffs landed, not {num_handoffs}") from self._error

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(DEADLINE_S)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for router in self._ends:
            poller.register(router, zmq.POLLIN)
        try:
            while not self._is_closing:
                arrived = poller.poll(_POLL_MS)
                with self._lock:
                    for router, _ in arrived:
                        self._answer_all(router)
        except Exception as error:
            self._error = error
            raise

    def _answer_all(self, router: zmq.Socket[Any]) -> None:
        while router.poll(0):
            session, header, *parts = router.recv_multipart()
            sizes, now_s = [len(part) for part in parts], time.monotonic()
            frame = frames.decode(header)
            for answer in self._ends[router].answers(session, frame, sizes, now_s):
                router.send_multipart([session, frames.encode(answer)])
