"""The answer to one request: the sink of all its choices, and its way to the client.

Chunks are pushed in synchronously and become text at once, so a stop string frees the nodes however
slowly the client reads. While the client keeps up, an event leaves in the turn that made it, behind
those of all other answers: waking a task for each token would cost more than the rest of a token,
and so would waking its reader between two writes. Everything else (the
status, the last event, and what waits for a slow client) is sent by the one task that waits in
`send`. What it has not sent yet is bounded by `max_tokens` of each choice.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from router.api.answers.chat_and_completions import AnswerForm, WholeChoice
from router.api.answers.json_parts import LOGPROBS_PER_PART, in_parts, num_logprobs
from router.core.generation import TokenChunk
from router.http.exchange import Reply
from router.text.output.choice_text import ChoiceText, Delta
from router.text.output.usage import Usage

CHARS_PER_TURN = 16 << 10
"""Characters of a whole answer that become JSON in one turn of the event loop: 0.1 ms of text, 10
ms of the shortest lists of log probabilities. 128 choices with a long prompt have ten million."""

PING_S = 5.0
"""A stream that has sent nothing for this time, or up to twice as long, sends a ping. The shortest
time-outs of clients and proxies are a multiple of it."""


def _nothing() -> None:
    """Do nothing: a choice that has not started, or has ended, has nothing to abort."""


def pieces_of(delta: Delta) -> Iterator[Delta]:
    """Yield a delta in pieces of at most `LOGPROBS_PER_PART` log probabilities.

    Its text and its tokens are in the first piece, its end in the last.
    """
    echoed = [(part, ()) for part in in_parts(delta.details.echoed)]
    pieces = [*echoed, *(((), tuple(part)) for part in in_parts(delta.entries))]
    if len(pieces) < 2:
        yield delta
        return
    for number, (of_prompt, entries) in enumerate(pieces, 1):
        details = replace(delta.details, echoed=of_prompt)
        if number < len(pieces):
            details = replace(details, finish_reason=None, stop_reason=None)
        piece = delta._replace(entries=entries, details=details)
        if number > 1:
            piece = piece._replace(text="", token_ids=(), num_tokens=0)
        yield piece


class AnswerTurns:
    """Turns for long work in pieces, which all requests share; who asks first is served first.

    Each request alone could give way between its pieces, and a hundred of them would still do a
    hundred pieces in one turn of the event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Return in a turn in which no other caller does another piece."""
        async with self._lock:
            await asyncio.sleep(0)


class Choice:
    """The sink of one choice."""

    def __init__(
        self,
        answer: Answer,
        index: int,
        text: ChoiceText,
        on_deltas: Callable[[Sequence[Delta]], None],
    ) -> None:
        """Begin a choice; `on_deltas` counts and times its part of the answer."""
        self._answer = answer
        self._index = index
        self._text = text
        self._on_deltas = on_deltas
        self._is_over = False
        self._abort: Callable[[], None] = _nothing

    def abort_by(self, abort: Callable[[], None]) -> None:
        """Set the function that aborts the choice on every node, once it was started."""
        self._abort = abort

    def abort(self) -> None:
        """End the choice on every node. Idempotent."""
        # Dropped, because it holds what holds this sink: a cycle would wait for the collector.
        abort, self._abort = self._abort, _nothing
        abort()

    def on_accepted(self) -> None:
        """Note that a node computes the prompt."""
        self._answer.on_accepted()

    def on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
        """Add the next chunks; see `router.core.generation.Sink`."""
        if self._is_over:
            return
        try:
            deltas = self._text.push_all(chunks)
            self._on_deltas(deltas)
            if deltas[-1].details.finish_reason is not None:
                self._is_over = True
                self.abort()  # the nodes go on where a stop string ended the choice
            self._answer.add(self._index, deltas)
        except Exception as error:
            self._is_over = True
            self._answer.fail(error)

    def send_now(self) -> None:
        """Send what was added, of this choice and of others."""
        self._answer.send_now()

    def on_failed(self, error: Exception) -> None:
        """End the whole answer with `error`, unless this choice is over."""
        if not self._is_over:
            self._is_over = True
            self._answer.fail(error)


class Answer(ABC):
    """One answer, streamed or whole: start its choices, `send` it, and `abort` in any case."""

    def __init__(
        self, form: AnswerForm, usage: Usage, reply: Reply, num_choices: int, turns: AnswerTurns
    ) -> None:
        """Set the answer up; `turns` are those of all answers, for what takes long."""
        self._turns = turns
        self._form = form
        self._usage = usage
        self._reply = reply
        self._choices: list[Choice] = []
        self._num_left = num_choices
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def new_choice(self, text: ChoiceText, on_deltas: Callable[[Sequence[Delta]], None]) -> Choice:
        """Return the sink of the next choice, which its owner starts."""
        choice = Choice(self, len(self._choices), text, on_deltas)
        self._choices.append(choice)
        return choice

    def add(self, index: int, deltas: Sequence[Delta]) -> None:
        """Add the next deltas of choice `index`; behind a failure they are dropped."""
        if self._error is not None:
            return
        self._num_left -= deltas[-1].details.finish_reason is not None
        self._put(index, deltas)

    @abstractmethod
    def on_accepted(self) -> None:
        """Note that a node computes the prompt of one more choice."""

    @abstractmethod
    def send_now(self) -> None:
        """Send what was added, if this is possible without waiting."""

    def fail(self, error: Exception) -> None:
        """End the answer with `error`, unless another error was first."""
        self._error = self._error or error
        self._wake()

    def abort(self) -> None:
        """End every choice that still runs, on all nodes."""
        for choice in self._choices:
            choice.abort()
        self._choices.clear()
        self._error = None  # once raised, its traceback holds this answer: a cycle as well

    @abstractmethod
    async def send(self) -> None:
        """Return when the client has the whole answer. Raises the error that ended it."""

    @abstractmethod
    def _put(self, index: int, deltas: Sequence[Delta]) -> None:
        """Show these deltas, and count them when they are shown."""

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait_push(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class StreamedAnswer(Answer):
    """Server-sent events. The last one is `[DONE]`.

    The status is sent when every choice was accepted by a node, at the latest with the first token.
    With log probabilities, of which many may come at once, the task in `send` makes the events.
    """

    def __init__(
        self,
        form: AnswerForm,
        usage: Usage,
        reply: Reply,
        num_choices: int,
        turns: AnswerTurns,
        *,
        has_logprobs: bool = False,
    ) -> None:
        super().__init__(form, usage, reply, num_choices, turns)
        self._has_logprobs = has_logprobs
        self._num_not_accepted = num_choices
        self._is_quiet = True
        self._ping_timer: asyncio.TimerHandle | None = None
        self._parts: list[bytes] = []
        self._pieces: deque[tuple[int, Delta]] = deque()

    async def send(self) -> None:
        """Send what could not be written at once; see `Answer.send`."""
        reply = self._reply
        while True:
            while not self._parts and not self._pieces:
                if self._error is not None:
                    raise self._error
                if self._num_not_accepted or reply.is_started:
                    await self._wait_push()
                else:
                    await self._start()
            self._make_some()
            part, self._parts = b"".join(self._parts), []
            is_last = not self._num_left and not self._pieces and self._error is None
            if not reply.is_started:
                await self._start()
            if is_last:
                await reply.end_stream(part + self._form.end_of_stream())
                return
            await reply.send_part(part)
            if self._pieces:
                await self._turns.next()

    def on_accepted(self) -> None:
        """Let the status be sent with the last choice that is accepted."""
        self._num_not_accepted -= 1
        if not self._num_not_accepted:
            self._wake()

    def send_now(self) -> None:
        """Write what was added, or wake the task in `send` where that is not possible."""
        parts = self._parts
        if not parts:
            return
        part = parts[0] if len(parts) == 1 else b"".join(parts)
        # While `send` waits, everything before this part was sent.
        if self._waiter is not None and self._num_left and self._reply.try_write(part):
            parts.clear()
        else:
            self._wake()

    def abort(self) -> None:
        """End every choice that still runs, on all nodes, and the pings."""
        super().abort()
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None

    async def _start(self) -> None:
        """Send the status, and pings from now on."""
        first = self._form.begin()
        self._wait_quiet()
        await self._reply.start_stream()
        await self._reply.send_part(first)

    def _wait_quiet(self) -> None:
        self._ping_timer = asyncio.get_running_loop().call_later(PING_S, self._ping_if_quiet)

    def _ping_if_quiet(self) -> None:
        # While `send` does not wait, it has something to send, or its client does not read.
        is_due = self._is_quiet and self._waiter is not None
        if is_due and not self._reply.try_write(self._form.ping):
            self._parts.append(self._form.ping)
            self._wake()
        self._is_quiet = True
        self._wait_quiet()

    def _make_some(self) -> None:
        """Make the events of as many pieces as one turn has time for."""
        num = 0
        while self._pieces and num < LOGPROBS_PER_PART:
            index, piece = self._pieces.popleft()
            self._usage.count(index, [piece])
            num += num_logprobs(piece.details.echoed) + num_logprobs(piece.entries)
            self._parts.append(self._form.events(index, [piece]))
            self._is_quiet = False

    def _put(self, index: int, deltas: Sequence[Delta]) -> None:
        if self._has_logprobs:
            self._pieces += ((index, piece) for delta in deltas for piece in pieces_of(delta))
            self._wake()
            return
        self._usage.count(index, deltas)
        part = self._form.events(index, deltas)
        if part:  # tokens may show nothing, for long
            self._is_quiet = False
        self._parts.append(part)


class WholeAnswer(Answer):
    """One JSON object, when every choice is over."""

    def __init__(
        self,
        form: AnswerForm,
        usage: Usage,
        reply: Reply,
        num_choices: int,
        turns: AnswerTurns,
        *,
        best_of: int,
        num_best: int,
    ) -> None:
        """Keep the `num_best` likeliest of each prompt's `best_of` choices, best first.

        Where the two numbers are equal, all choices are kept in their order.
        """
        super().__init__(form, usage, reply, num_choices, turns)
        self._best_of, self._num_best = best_of, num_best
        self._wholes = [WholeChoice() for _ in range(num_choices)]

    def on_accepted(self) -> None:
        """Do nothing: the status may still be that of an error."""

    def send_now(self) -> None:
        """Do nothing: the answer is sent when it is whole."""

    async def send(self) -> None:
        """Send the whole answer; see `Answer.send`."""
        while self._num_left and self._error is None:
            await self._wait_push()
        if self._error is not None:
            raise self._error
        await self._reply.send_json_bytes(b"".join([part async for part in self._json()]))

    async def _json(self) -> AsyncIterator[bytes]:
        """Yield the answer in parts, made in turns of their own behind the first."""
        parts, num_chars = [], 0
        for part in self._form.whole(self._returned()):
            parts.append(part)
            num_chars += len(part)
            if num_chars >= CHARS_PER_TURN:
                yield "".join(parts).encode()
                parts, num_chars = [], 0
                await self._turns.next()
        yield "".join(parts).encode()

    def _returned(self) -> list[WholeChoice]:
        wholes, best_of = self._wholes, self._best_of
        if best_of == self._num_best:
            return wholes
        returned: list[WholeChoice] = []
        for first in range(0, len(wholes), best_of):
            likeliest = sorted(wholes[first : first + best_of], key=lambda w: -w.mean_logprob)
            returned += likeliest[: self._num_best]
        return returned

    def _put(self, index: int, deltas: Sequence[Delta]) -> None:
        self._usage.count(index, deltas)
        for delta in deltas:
            self._wholes[index].add(delta)
        if not self._num_left:
            self._wake()
