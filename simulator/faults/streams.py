"""The stream of a router and a node in one life: a model of gRPC over TCP.

Messages of one stream keep their order, in each direction, and wait while their path is cut. A
stream ends as a whole: messages that were not read by then are never read. A router that was not
told of the end opens it again when its node was silent for too long (`router.dispatch.liveness`);
the node learns of that when the path to it is open.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Protocol

from common.ids import Incarnation
from node.flow.messages import Message, RouterGone, SendBlocks, Submit
from router.dispatch.client.node_clients import UNREACHED, backoff_s
from router.dispatch.liveness.node_liveness import NodeLiveness, NodeVerdict
from router.dispatch.liveness.silence import TICK_S
from simulator.faults.hosts import Paths, ProcessClock
from simulator.node import NodeSaid
from simulator.timeline import Timeline

CONNECT_TIMEOUT_S = 1.0
RESET = "the connection was reset"


class LinkListener(Protocol):
    """The router of a link."""

    me: Incarnation
    clock: ProcessClock
    is_wide: bool
    """Whether it asks its nodes for heartbeats as a router with many nodes does."""

    def has_requests(self, node: Incarnation) -> bool:
        """Return whether it has a request on a node."""

    def on_message(
        self, node: Incarnation, said: NodeSaid, *, is_first: bool, unreached: str
    ) -> None:
        """Take a message; `is_first` of a new stream. `unreached`: see `on_heard`."""

    def on_heard(self, node: Incarnation, unreached: str) -> None:
        """Record that the node is heard, and why nothing reaches it, if so."""

    def on_suspected(self, node: Incarnation, reason: str, *, is_heard: bool) -> None:
        """Suspect a node, which is silent, or heard and not reached."""

    def on_lost(self, node: Incarnation, reason: str) -> None:
        """Handle the end of a stream that was heard; it is opened again."""


class LinkedNode(Protocol):
    """The node of a link, in one life."""

    me: Incarnation
    clock: ProcessClock
    is_death_known: bool
    """Whether its host says that it is dead."""
    streams: dict[Incarnation, NodeLink]
    """The open streams by router, as far as this end knows."""

    @property
    def stuck_s(self) -> float:
        """How long its step has lasted, if it says that it makes no progress; 0 otherwise."""
        ...

    def put(self, message: Message) -> None:
        """Take a message."""

    def all_cached(self) -> NodeSaid:
        """Return the first message of a stream."""
        ...


class NodeLink:
    """A router's stream with a node, opened again whenever it ends."""

    def __init__(
        self,
        router: LinkListener,
        node: LinkedNode,
        timeline: Timeline,
        paths: Paths,
        latency_s: float,
    ) -> None:
        self._router = router
        self.node = node
        self._there_way = router.me.node_id, node.me.node_id
        self._back_way = node.me.node_id, router.me.node_id
        self._timeline = timeline
        self._paths = paths
        self._latency_s = latency_s
        self._liveness = NodeLiveness()
        self._number = 0
        self._unsent_echo = self._echoed = 0
        self._beat_ticks = 1
        """The longest silence of the node that the router allows."""
        self._num_quiet = 0
        """Ticks since the last message of the node."""
        self._num_failures = 0
        self._num_taken = 0
        self.is_heard = False
        self._is_closed = False
        self._is_waiting = False
        """Whether there is no connection: it is opened after a pause."""
        self._number_there = 0
        """The number of the stream of this link that the node has open, if any."""
        self._open_calls: set[int] = set()
        """The calls on the open stream that the node has not answered."""
        self._there: deque[tuple[int, Message | None]] = deque()
        self._back: deque[tuple[int, NodeSaid | str]] = deque()
        """Messages on their way from the node; a string is the end of the stream, and why."""
        self.connect()

    @property
    def router(self) -> Incarnation:
        """The incarnation of the router that has this stream."""
        return self._router.me

    @property
    def has_told_all(self) -> bool:
        """Whether the router has read all that the node has said, and hears what it says."""
        is_heard = self.is_heard and self._number == self._number_there
        return is_heard and self._is_open_there and not self._back

    # Called by the router.

    def connect(self) -> None:
        """Open the stream."""
        if self._is_closed:
            return
        self._is_waiting = False
        self._number += 1
        self._num_taken = 0
        self._liveness.restart()
        self._unsent_echo = self._echoed = self._num_quiet = 0
        self._beat_ticks = 1
        self._timeline.after(self._latency_s, partial(self._reach, self._number))

    def send(self, message: Message) -> bool:
        """Send a message; return False when there is no stream."""
        if not self.is_heard:
            return False
        if isinstance(message, (Submit, SendBlocks)):  # somebody waits for it
            self._unsent_echo = self._liveness.use() or self._unsent_echo
        self._put_there(message)
        return True

    def close(self) -> None:
        """End the stream for good."""
        self._is_closed, self.is_heard = True, False
        self._put_there(None)
        self._number += 1

    def tick(self, *, is_alarm: bool) -> None:
        """Count a tick of silence, as `NodeClient.tick` does, and read messages that arrived.

        `is_alarm`: a node that is not used is asked as often as one that is.
        """
        liveness, is_open = self._liveness, self._is_open_there
        there, back = self._is_path_open(), self._is_path_back()
        is_alive = self.node.clock.is_running
        is_running = self.is_heard and is_alive and there and back
        is_wide = self._router.is_wide
        is_used = not is_wide or self._router.has_requests(self.node.me)
        number = 0
        if is_used or is_alarm or not liveness.rest():
            number = liveness.tick(
                is_wide=is_wide, is_used=is_used, is_alarm=is_alarm, is_running=lambda: is_running
            )
        number, self._unsent_echo = number or self._unsent_echo, 0
        is_told = number > 0 and there
        self._num_quiet += 1
        is_saying = is_told or self._num_quiet >= self._beat_ticks
        if self.is_heard and is_open and is_alive and back and not self._back and is_saying:
            liveness.heard()
            self._num_quiet = 0
            if is_told:
                self._echoed = number
                self._beat_ticks = max(1, round(liveness.pace.beat_ms / 1000 / TICK_S))
            liveness.repeated(self._echoed)
            self._router.on_heard(self.node.me, "" if liveness.is_reached else UNREACHED)
        if not self.is_heard:
            if liveness.judge() is NodeVerdict.LOST and not self._is_waiting:
                self._put_there(None)
                self._try_again()
            return
        verdict = liveness.judge()
        if verdict is NodeVerdict.LOST:
            self._put_there(None)
            self._lose(liveness.reason)
        elif verdict is NodeVerdict.SUSPECTED:
            self._router.on_suspected(self.node.me, liveness.reason, is_heard=False)
        elif verdict is NodeVerdict.UNREACHED:
            self._router.on_suspected(self.node.me, UNREACHED, is_heard=True)

    # Called by the node.

    def say(self, said: NodeSaid) -> None:
        """Send a message of the node, if its end of the stream is open."""
        if self._is_open_there:
            self._back.append((self._number_there, said))
            self._timeline.after(self._latency_s, self._arrive_back)

    def end_call(self, reply_to: int) -> bool:
        """Record that the node answers a call; return whether the call came on this stream."""
        if reply_to not in self._open_calls:
            return False
        self._open_calls.remove(reply_to)
        return True

    # Called by the network.

    def on_break(self, *, arrives: bool) -> None:
        """Reset the connection; with `arrives` the node first reads the messages sent to it."""
        while arrives and self._there and self._is_path_open():
            self._arrive()
        self._there.clear()
        self._back.clear()
        if self._is_open_there:
            self.node.clock.run(partial(self._end_there, self._number_there))
        self._router.clock.run(partial(self._on_reset, self._number))

    def on_node_dead(self, *, is_known: bool, reason: str = RESET) -> None:
        """Handle the end of the node's process; its host reports it if `is_known`."""
        self._there.clear()
        if is_known:
            self._back.append((self._number, reason))
            self._timeline.after(self._latency_s, self._arrive_back)

    def on_router_dead(self, *, is_known: bool) -> None:
        """Handle the end of the router's process."""
        self._is_closed, self.is_heard = True, False
        self._back.clear()
        self._there.clear()
        span_s = self._latency_s if is_known else CONNECT_TIMEOUT_S
        ends = partial(self._end_there, self._number_there)
        self._timeline.after(span_s, partial(self.node.clock.run, ends))

    def flush(self) -> None:
        """Deliver the messages that waited for a path that is open again."""
        for _ in self._there:
            self._timeline.after(self._latency_s, self._arrive)
        for _ in self._back:
            self._timeline.after(self._latency_s, self._arrive_back)

    # Inside: opening.

    def _reach(self, number: int) -> None:
        if number != self._number or self._is_closed:
            return
        node = self.node
        if not node.clock.is_alive or not self._is_path_open():
            is_told = node.is_death_known and self._is_path_open() and self._is_path_back()
            span_s = self._latency_s if is_told else CONNECT_TIMEOUT_S
            failed = partial(self._on_failed, number)
            self._router.clock.after(span_s, failed)
            return
        node.clock.run(partial(self._open_there, number))

    def _on_failed(self, number: int) -> None:
        if number == self._number and not self._is_closed:
            self._try_again()

    def _try_again(self) -> None:
        pause_s = backoff_s(self._num_failures)
        self._num_failures += 1
        self._number += 1
        self._is_waiting = True
        self._router.clock.after(pause_s, self.connect)

    def _open_there(self, number: int) -> None:
        node, router = self.node, self.router
        earlier = node.streams.get(router)
        if earlier is not None:
            earlier._end_there(earlier._number_there)
        node.streams[router] = self
        self._number_there = number
        self.say(node.all_cached())

    # Inside: both ends.

    @property
    def _is_open_there(self) -> bool:
        return self.node.streams.get(self._router.me) is self

    def _is_path_open(self) -> bool:
        return self._paths.is_open(*self._there_way)

    def _is_path_back(self) -> bool:
        return self._paths.is_open(*self._back_way)

    def _put_there(self, message: Message | None) -> None:
        self._there.append((self._number, message))
        self._timeline.after(self._latency_s, self._arrive)

    def _arrive(self) -> None:
        if self._there and self._is_path_open():
            number, message = self._there.popleft()
            self.node.clock.run(partial(self._take_there, number, message))

    def _take_there(self, number: int, message: Message | None) -> None:
        node = self.node
        if not self._is_open_there or self._number_there != number:
            return
        if message is None:
            self._end_there(number)
        elif isinstance(message, Submit):
            self._open_calls.add(message.reply_to)
            node.put(replace(message, received_at_s=node.clock.now_s()))
        else:
            node.put(message)

    def _end_there(self, number: int) -> None:
        if self._is_open_there and self._number_there == number:
            del self.node.streams[self.router]
            self._open_calls.clear()
            self.node.put(RouterGone(self.router))

    def _arrive_back(self) -> None:
        if self._back and self._is_path_back():
            number, said = self._back.popleft()
            self._router.clock.run(partial(self._take_back, number, said))

    def _take_back(self, number: int, said: NodeSaid | str) -> None:
        if number != self._number or self._is_closed:
            return
        if isinstance(said, str):
            self._on_reset(number, said)
            return
        self._liveness.heard()
        self.is_heard, self._num_quiet = True, 0
        is_first = self._num_taken == 0
        self._num_taken += 1
        unreached = "" if self._liveness.is_reached else UNREACHED
        self._router.on_message(self.node.me, said, is_first=is_first, unreached=unreached)

    def _on_reset(self, number: int, reason: str = RESET) -> None:
        if number != self._number or self._is_closed or self._is_waiting:
            return
        if self.is_heard:
            self._lose(reason)
        else:
            self._try_again()

    def _lose(self, reason: str) -> None:
        self.is_heard = False
        self._num_failures = 0
        self._number += 1
        self._router.on_lost(self.node.me, reason)
        if not self._is_closed:
            self._try_again()
