"""The calls on one router's stream: each becomes a message to the step thread and gets one answer.

An invalid call is answered with its error. A violation of the protocol ends the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    PdserveError,
    PeerProtocolError,
)
from common.grammar import Grammar
from common.ids import Incarnation
from common.observing.clock import Clock
from common.observing.logs import log_fields
from common.request import GenerationRequest
from node.control.pulls import fetch_from_proto, send_blocks_from_proto, warm_node_from_proto
from node.control.tickets import ticket_from_proto
from node.flow.inbox import Inbox
from node.flow.messages import (
    AbortAttempt,
    Answer,
    CallRefused,
    Compiled,
    Message,
    PullRefused,
    Submit,
)
from protos import pdserve_node_pb2 as pb
from protos.codec import attempts_from_proto, request_from_proto, source_from_proto

log = logging.getLogger("pdserve.node.attempts")
log_of_node = logging.getLogger("pdserve.node")

MAX_WAITING_CALLS = 8192
"""Unanswered calls of one router; more are refused."""
MAX_CALLS_PER_MESSAGE = 4096
MAX_ABORTS_PER_MESSAGE = 4096
FULL_INBOX_PAUSE_S = 0.05


PrepareGrammar = Callable[[Grammar], "Future[None] | None"]
"""Begins to compile a grammar; None: it is compiled. Raises `Overloaded`."""


class Replies:
    """Calls that wait for the step thread. Belongs to the event loop; `resolve` is thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[int, Callable[[Answer], None]] = {}
        self._ids = count(1)

    def __len__(self) -> int:
        """Return the number of calls without an answer."""
        return len(self._waiting)

    def new(self, on_answer: Callable[[Answer], None]) -> int:
        """Return a new `reply_to`; `on_answer` is called on the event loop with its answer."""
        reply_to = next(self._ids)
        self._waiting[reply_to] = on_answer
        return reply_to

    def forget(self, reply_to: int) -> None:
        """Stop waiting: a late answer is dropped."""
        self._waiting.pop(reply_to, None)

    def resolve(self, reply_to: int, answer: Answer) -> None:
        """Answer a call; thread-safe."""
        self._loop.call_soon_threadsafe(self._set, reply_to, answer)

    def _set(self, reply_to: int, answer: Answer) -> None:
        on_answer = self._waiting.pop(reply_to, None)
        if on_answer is not None:
            on_answer(answer)


@dataclass(slots=True)
class _Waiting:
    """A call without an answer yet."""

    submit: Submit
    timer: asyncio.TimerHandle


class IgnoredPriorities:
    """Sees every request of a node. Belongs to the event loop."""

    def __init__(self, *, are_enabled: bool) -> None:
        self._is_due = not are_enabled

    def see(self, request: GenerationRequest) -> None:
        """Log a warning for the first request whose priority is ignored."""
        if self._is_due and request.priority:
            self._is_due = False
            log_of_node.warning(
                "a request has the priority %d, and priorities are ignored: they count with "
                "--enable-priority-scheduling (this is logged once)",
                request.priority,
            )


class RouterCalls:
    """Takes the calls of one router; calls `answer` once for each, with its id and its answer."""

    def __init__(
        self,
        router: Incarnation,
        inbox: Inbox,
        replies: Replies,
        clock: Clock,
        *,
        answer: Callable[[int, Answer], None],
        prepare_grammar: PrepareGrammar,
        priorities: IgnoredPriorities,
    ) -> None:
        self._router = router
        self._inbox = inbox
        self._replies = replies
        self._clock = clock
        self._answer = answer
        self._prepare_grammar = prepare_grammar
        self._priorities = priorities
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _Waiting] = {}

    async def take(self, message: pb.RouterMessage) -> None:
        """Take the calls, pulls and aborts of one message, in its order.

        Raises `PeerProtocolError` for a message that must end the stream.
        """
        num_calls = len(message.calls) + len(message.pulls) + len(message.fetches)
        num_calls += len(message.refused_pulls) + len(message.new_nodes)
        num_aborts = len(message.aborts.request_ids)
        if num_calls > MAX_CALLS_PER_MESSAGE or num_aborts > MAX_ABORTS_PER_MESSAGE:
            raise PeerProtocolError(
                f"a message of {num_calls} calls and {num_aborts} aborts: wanted at most "
                f"{MAX_CALLS_PER_MESSAGE} and {MAX_ABORTS_PER_MESSAGE}"
            )
        for call in message.calls:
            self._take_call(call)
        for pull in message.pulls:
            await self._take(partial(send_blocks_from_proto, pull), "a pull")
        for fetch in message.fetches:
            await self._take(partial(fetch_from_proto, fetch), "a fetch")
        for lease_token in message.refused_pulls:
            await self._put(PullRefused(lease_token))
        for new in message.new_nodes:
            await self._take(partial(warm_node_from_proto, new), "a new node")
        if message.HasField("aborts"):
            await self._put(AbortAttempt(self._router, attempts_from_proto(message.aborts)))

    def close(self) -> None:
        """Forget all calls: the stream has ended, so nobody waits for an answer."""
        for waiting in self._waiting.values():
            waiting.timer.cancel()
            self._replies.forget(waiting.submit.reply_to)
        self._waiting.clear()

    async def _take(self, made: Callable[[Incarnation], Message], what: str) -> None:
        """Queue what is no call; drop what cannot be read: at worst a prompt is computed."""
        try:
            message = made(self._router)
        except InvalidRequest as error:
            log.warning("%s of %s is dropped: %s", what, self._router, error)
        else:
            await self._put(message)

    async def _put(self, message: Message) -> None:
        """Queue what is no call for the step thread.

        Nothing is lost: while the inbox has no room for it, nothing more is read from this router.
        """
        while True:
            try:
                self._inbox.put(message)
            except Overloaded:
                await asyncio.sleep(FULL_INBOX_PAUSE_S)
            else:
                return

    def _take_call(self, call: pb.Call) -> None:
        call_id = call.id
        if call_id in self._waiting:
            raise PeerProtocolError(f"call {call_id} came again before its reply")
        reply_to = self._replies.new(partial(self._on_answer, call_id))
        try:
            if len(self._waiting) >= MAX_WAITING_CALLS:
                raise Overloaded(f"{MAX_WAITING_CALLS} calls of {self._router} wait for a reply")
            submit = self._submit(call, reply_to)
            self._priorities.see(submit.request)
            grammar = submit.request.sampling.grammar
            compiling = None if grammar is None else self._prepare_grammar(grammar)
            if compiling is not None:
                submit = replace(submit, is_compiling=True)
            self._inbox.put(submit)
        except PdserveError as error:
            self._replies.forget(reply_to)
            self._answer(call_id, CallRefused(error))
            return
        if compiling is not None:
            # After the call in the inbox, also where the compilation has ended meanwhile.
            compiling.add_done_callback(partial(self._on_compiled, submit))
        # The call waits no longer than the request's deadline allows.
        timer = self._loop.call_later(submit.request.deadline_s, self._on_deadline, call_id)
        self._waiting[call_id] = _Waiting(submit, timer)

    def _on_compiled(self, submit: Submit, compiled: Future[None]) -> None:
        """Send the result to the step thread. Runs on the thread that compiled."""
        error = compiled.exception()
        if error is not None and not isinstance(error, PdserveError):
            error = InternalError(f"a grammar was not compiled: {error!r}")
        self._inbox.put(Compiled(submit.request.id, submit.reply_to, error))

    def _submit(self, call: pb.Call, reply_to: int) -> Submit:
        match call.WhichOneof("ask"):
            case "reserve":
                return self._reservation(call.reserve, reply_to)
            case "prefill":
                return self._prompt(call.prefill, reply_to)
        raise PeerProtocolError(f"call {call.id} requests nothing that this node knows")

    def _reservation(self, message: pb.ReserveRequest, reply_to: int) -> Submit:
        """Make a message that reserves blocks and a seat, or starts a short prompt at once."""
        has_source = message.HasField("source")
        return Submit(
            request=request_from_proto(message.request),
            router=self._router,
            reply_to=reply_to,
            received_at_s=self._clock.now_s(),
            source=source_from_proto(message.source) if has_source else None,
            must_prefill_locally=message.must_prefill_locally,
            may_wait=message.may_wait,
        )

    def _prompt(self, message: pb.PrefillRequest, reply_to: int) -> Submit:
        """Make a message that prefills a prompt."""
        request, ticket, source = request_from_proto(message.request), None, None
        if message.HasField("ticket"):
            ticket = ticket_from_proto(message.ticket, request.id)
        if message.HasField("source"):
            source = source_from_proto(message.source)
        return Submit(
            request=request,
            router=self._router,
            reply_to=reply_to,
            received_at_s=self._clock.now_s(),
            is_prompt=True,
            ticket=ticket,
            source=source,
        )

    def _on_answer(self, call_id: int, answer: Answer) -> None:
        waiting = self._waiting.pop(call_id)
        waiting.timer.cancel()
        _log_begin(waiting.submit, answer)
        self._answer(call_id, answer)

    def _on_deadline(self, call_id: int) -> None:
        waiting = self._waiting.pop(call_id)
        self._replies.forget(waiting.submit.reply_to)
        late = DeadlineExceeded("the request's deadline passed on the node")
        self._answer(call_id, CallRefused(late))


def _log_begin(submit: Submit, answer: Answer) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    refusal = answer.error.code if isinstance(answer, CallRefused) else None
    log.debug(
        "an attempt was %s",
        "refused" if refusal else "taken",
        extra=log_fields(submit.request.id, router=str(submit.router), code=refusal),
    )
