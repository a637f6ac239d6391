"""One stream per router: the outputs of a step for a router leave in one message, replies first.

The step thread adds outputs and flushes. On the event loop each router gets a message as fast as it
reads; unread outputs wait for its next message, up to a bound. The stream of a router that exceeds
the bound is ended, which aborts its attempts. What the tiers have gained and lost goes with
the messages: nobody is woken for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable

from common.ids import Incarnation
from common.kv.blocks import BlockHash
from common.kv.tiers import Tier
from common.prompt_logprobs import MAX_ENTRIES, num_entries
from common.request import RequestOutput
from node.control.block_reports import BlockReports, CachedBlocks, News
from node.control.pulls import add_offer, pull_to_proto, refused_to_proto
from node.flow.messages import AskBlocks, OfferBlocks, RefusePull, SendOutput
from protos import pdserve_node_pb2 as pb
from protos.output_batches import outputs_to_proto

log = logging.getLogger("pdserve.node")

MAX_PENDING = 65536
"""Unread replies, outputs and pulls of one router."""
PULLS_PER_MESSAGE = 32
"""Each has at most 8192 blocks, and so some 150 KiB."""
MOST_OFFERS = 16
HEARTBEAT_S = 0.25
"""A message without content goes to a router that was sent nothing for this long."""
LONGEST_BEAT_S = 13.0
"""A router may allow a longer silence, up to this."""

OnGone = Callable[[Incarnation], None]


class RouterStream:
    """Replies and outputs that wait for one router. Belongs to the event loop."""

    def __init__(self, router: Incarnation, reports: BlockReports, warm_from: str) -> None:
        self.router = router
        self.reports = reports
        self.replies: list[pb.Reply] = []
        self.outputs: list[RequestOutput] = []
        self.pulls: list[pb.Pull] = []
        self.refused: list[pb.RefusedPull] = []
        self.offers: list[OfferBlocks] = []
        self.warm_from = warm_from
        self._has_prompt_logprobs = False
        self.wake = asyncio.Event()
        self.is_cut = False
        self.echo = 0
        """The latest number that the router has sent."""
        self._beat_s = 0.0

    @property
    def num_pending(self) -> int:
        """The number of replies, outputs and pulls that were not sent yet."""
        return len(self.replies) + len(self.outputs) + len(self.pulls) + len(self.refused)

    def take_echo(self, number: int, beat_ms: int) -> None:
        """Take a number to repeat, 0: none; at once if the router says how long the node may be
        silent."""
        if not number:
            return
        self.echo, self._beat_s = number, beat_ms / 1000
        if beat_ms:
            self.wake.set()

    @property
    def beat_s(self) -> float:
        """The time after a message in which the next one leaves, with or without content."""
        return max(HEARTBEAT_S, min(self._beat_s, LONGEST_BEAT_S))

    def add(self, output: RequestOutput) -> None:
        """Queue an output."""
        self.outputs.append(output)
        if output.details.prompt_logprobs is not None:
            self._has_prompt_logprobs = True

    def take(self) -> pb.NodeMessage:
        """Return a message with all that waits, and keep none; an empty one is a heartbeat.

        Outputs after `MAX_ENTRIES` log probabilities of prompts stay, and pulls after
        `PULLS_PER_MESSAGE`: a message has a bound.
        """
        end = self._end_of_message() if self._has_prompt_logprobs else len(self.outputs)
        message = pb.NodeMessage(
            replies=self.replies,
            outputs=outputs_to_proto(self.outputs[:end]) if end else None,
            echo=self.echo,
            blocks=self.reports.next(),
            pulls=self.pulls[:PULLS_PER_MESSAGE],
            warm_from=self.warm_from,
            refused_pulls=self.refused,
        )
        if self.offers:
            add_offer(message, self.offers.pop(0))
        self.warm_from = ""
        self.refused.clear()
        self.replies, self.outputs = [], self.outputs[end:]
        del self.pulls[:PULLS_PER_MESSAGE]
        self._has_prompt_logprobs = bool(self.outputs)
        return message

    def _end_of_message(self) -> int:
        num_left = MAX_ENTRIES
        for index, output in enumerate(self.outputs):
            found = output.details.prompt_logprobs
            if found is not None:
                num_left -= num_entries(len(found), found.num_top)
                if num_left < 0 and index:
                    return index
        return len(self.outputs)


class OutputStreams:
    """Open streams by router. `on_gone` is called once for each stream that ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_gone: OnGone) -> None:
        self._loop = loop
        self._on_gone = on_gone
        self.warm_from = ""
        """Streams that are opened say that this node wants the blocks of that one, or of any."""
        self._streams: dict[Incarnation, RouterStream] = {}
        self._lock = threading.Lock()
        self._unflushed: list[SendOutput] = []
        self._in_transit: list[SendOutput] = []
        self._cached = CachedBlocks()
        self._unflushed_news: News = {}
        self._news_in_transit: dict[Tier, dict[BlockHash, bool]] = {}
        self._is_stopping = False
        self.fault = ""
        """Why the node stops, where it does not leave in order."""

    # --- the step thread's side ---------------------------------------------------------------

    def add(self, sent: SendOutput) -> None:
        """Keep an output for the next `flush`."""
        self._unflushed.append(sent)

    def ask(self, wanted: AskBlocks) -> None:
        """Send a pull to a router, which passes it on; at once, because a prompt waits for it."""
        self._loop.call_soon_threadsafe(self._add_pull, wanted)

    def refuse(self, refused: RefusePull) -> None:
        """Report a refused pull to the router that passed it on; at once, as above."""
        self._loop.call_soon_threadsafe(self._add_refused, refused)

    def offer(self, offered: OfferBlocks) -> None:
        """Offer cached blocks, through the router of a new node or any, if there is one."""
        self._loop.call_soon_threadsafe(self._add_offer, offered)

    def start_is_over(self) -> None:
        """Stop asking routers that connect from now on to warm this node."""
        self.warm_from = ""

    def add_news(self, news: News) -> None:
        """Keep what tiers have gained and lost since the last flush for the next one."""
        self._unflushed_news = {tier: changed for tier, changed in news.items() if changed}

    def flush(self) -> None:
        """Pass what was added since the last flush to the event loop."""
        news = self._unflushed_news
        if not self._unflushed and not news:
            return
        with self._lock:
            is_scheduled = bool(self._in_transit or self._news_in_transit)
            self._in_transit += self._unflushed
            for tier, changed in news.items():
                self._news_in_transit.setdefault(tier, {}).update(changed)
        self._unflushed, self._unflushed_news = [], {}
        if not is_scheduled:
            self._loop.call_soon_threadsafe(self._deliver)

    # --- the event loop's side ----------------------------------------------------------------

    def open(self, router: Incarnation) -> RouterStream:
        """Return a new stream for this router; its earlier stream, if any, ends."""
        self._end(self._streams.get(router))
        reports = BlockReports(self._cached)
        stream = self._streams[router] = RouterStream(router, reports, self.warm_from)
        return stream

    def reply(self, stream: RouterStream, reply: pb.Reply) -> None:
        """Queue the reply to a call that came on this stream."""
        if not stream.is_cut:
            stream.replies.append(reply)
            self._on_added(stream)

    def close(self, stream: RouterStream) -> None:
        """End a stream whose router has left or broke the protocol: nothing more is sent."""
        self._end(stream)

    def stop(self, fault: str = "") -> None:
        """End every stream after it has sent what waits. `fault`: of the node, if it has one."""
        self._is_stopping, self.fault = True, fault
        for stream in self._streams.values():
            stream.wake.set()

    async def read(self, stream: RouterStream) -> AsyncGenerator[pb.NodeMessage, None]:
        """Yield the messages for a router until its stream ends; the stream ends with this."""
        try:
            yield stream.take()  # at once: a router chooses only nodes that have sent something
            while not stream.is_cut:
                if not (stream.num_pending or stream.offers or stream.reports.is_behind):
                    # Even while stopping the loop must run once: outputs may be in transit.
                    await _wait(stream.wake, 0.0 if self._is_stopping else stream.beat_s)
                stream.wake.clear()
                yield stream.take()
                if self._is_stopping and not stream.num_pending and not self._in_transit:
                    return
        finally:
            self._end(stream)

    def _deliver(self) -> None:
        with self._lock:
            delivered, self._in_transit = self._in_transit, []
            news, self._news_in_transit = self._news_in_transit, {}
        if news:
            self._cached.take(news)
            for told in self._streams.values():
                told.reports.add(news)
        for sent in delivered:
            stream = self._streams.get(sent.router)
            if stream is not None:
                stream.add(sent.output)
                self._on_added(stream)

    def _add_pull(self, wanted: AskBlocks) -> None:
        stream = self._streams.get(wanted.router)
        if stream is not None:
            stream.pulls.append(pull_to_proto(wanted))
            self._on_added(stream)

    def _add_refused(self, refused: RefusePull) -> None:
        stream = self._streams.get(refused.router)
        if stream is not None:
            stream.refused.append(refused_to_proto(refused))
            self._on_added(stream)

    def _add_offer(self, offered: OfferBlocks) -> None:
        stream = next(iter(self._streams.values()), None)
        if offered.new_node is not None:
            stream = self._streams.get(offered.new_node.router)
        if stream is not None and len(stream.offers) < MOST_OFFERS:
            stream.offers.append(offered)
            stream.wake.set()

    def _on_added(self, stream: RouterStream) -> None:
        stream.wake.set()
        if stream.num_pending > MAX_PENDING:
            log.warning("router %s does not read its tokens: its stream is ended", stream.router)
            self._end(stream)

    def _end(self, stream: RouterStream | None) -> None:
        """End a stream, once; a later stream of the same router is not affected."""
        if stream is None or stream.is_cut:
            return
        stream.is_cut = True
        stream.wake.set()
        stream.outputs.clear()
        stream.replies.clear()
        stream.pulls.clear()
        stream.refused.clear()
        del self._streams[stream.router]
        self._on_gone(stream.router)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
