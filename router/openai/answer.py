"""The answer to one request: the sink of all its choices, and its way to the client.

Chunks are pushed in synchronously and become text at once, so a stop string frees the nodes however
slowly the client reads. While the client keeps up, an event leaves with the push that made it:
waking a task for each token would cost more than the rest of a token. Everything else (the first
event, which the status precedes, the last one, and what waits for a slow client) is sent by the one
task that waits in `send`. What it has not sent yet is bounded by `max_tokens` of each choice.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from router.core.generation import Sink, TokenChunk
from router.http.exchange import Reply
from router.openai.formats import AnswerForm, WholeChoice
from router.text.choice_text import ChoiceText, Delta
from router.text.usage import Usage

CHARS_PER_TURN = 256 << 10
"""Of a whole answer that become JSON in one turn of the event loop, which takes 2 ms. 128 choices
that repeat a long prompt are some ten million characters."""


def _nothing() -> None:
    """Abort what has not started, or is over."""


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

    def start(self, generate: Callable[[Sink], Callable[[], None]]) -> None:
        """Start the choice: `generate` takes its sink and returns its abort."""
        self._abort = generate(self)

    def abort(self) -> None:
        """End the choice on every node. Idempotent."""
        # Dropped, because it holds what holds this sink: a cycle would wait for the collector.
        abort, self._abort = self._abort, _nothing
        abort()

    def on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
        """Add the next chunks; see `router.core.generation.Sink`."""
        if self._is_over:
            return
        try:
            deltas = self._text.push_all(chunks)
            self._on_deltas(deltas)
            if deltas[-1].finish_reason is not None:
                self._is_over = True
                self.abort()  # the nodes go on where a stop string ended the choice
            self._answer.add(self._index, deltas)
        except Exception as error:
            self._is_over = True
            self._answer.fail(error)

    def on_failed(self, error: Exception) -> None:
        """End the whole answer with `error`, unless this choice is over."""
        if not self._is_over:
            self._is_over = True
            self._answer.fail(error)


class Answer(ABC):
    """One answer, streamed or whole: `start` its choices, `send` it, and `abort` in any case."""

    def __init__(self, form: AnswerForm, usage: Usage, reply: Reply, num_choices: int) -> None:
        self._form = form
        self._usage = usage
        self._reply = reply
        self._choices: list[Choice] = []
        self._num_left = num_choices
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def start(
        self,
        text: ChoiceText,
        on_deltas: Callable[[Sequence[Delta]], None],
        generate: Callable[[Sink], Callable[[], None]],
    ) -> None:
        """Start the next choice: `generate` takes its sink and returns its abort."""
        choice = Choice(self, len(self._choices), text, on_deltas)
        self._choices.append(choice)
        choice.start(generate)

    def add(self, index: int, deltas: Sequence[Delta]) -> None:
        """Add the next deltas of choice `index`; behind a failure they are dropped."""
        if self._error is not None:
            return
        self._usage.count(index, deltas)
        self._num_left -= deltas[-1].finish_reason is not None
        self._put(index, deltas)

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
    def _put(self, index: int, deltas: Sequence[Delta]) -> None: ...

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait_push(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class StreamedAnswer(Answer):
    """Server-sent events. The status is sent with the first, `[DONE]` with the last."""

    def __init__(self, form: AnswerForm, usage: Usage, reply: Reply, num_choices: int) -> None:
        super().__init__(form, usage, reply, num_choices)
        self._parts: list[bytes] = []

    async def send(self) -> None:
        """Send what could not be written at once; see `Answer.send`."""
        reply = self._reply
        while True:
            while not self._parts:
                if self._error is not None:
                    raise self._error
                await self._wait_push()
            part, self._parts = b"".join(self._parts), []
            is_last = not self._num_left and self._error is None
            if not reply.is_started:
                await reply.start_stream()
            if is_last:
                await reply.end_stream(part + self._form.end_of_stream())
                return
            await reply.send_part(part)

    def _put(self, index: int, deltas: Sequence[Delta]) -> None:
        part = self._form.events(index, deltas)
        # While `send` waits, everything before this part was sent.
        if self._waiter is not None and self._num_left and self._reply.try_write(part):
            return
        self._parts.append(part)
        self._wake()


class WholeAnswer(Answer):
    """One JSON object, when every choice is over."""

    def __init__(
        self,
        form: AnswerForm,
        usage: Usage,
        reply: Reply,
        num_choices: int,
        *,
        best_of: int = 1,
        num_best: int = 1,
    ) -> None:
        """Of each `best_of` choices, which answer one prompt, the client gets the `num_best`
        likeliest, best first; all of them, in order, where the two numbers are equal.
        """
        super().__init__(form, usage, reply, num_choices)
        self._best_of, self._num_best = best_of, num_best
        self._wholes = [WholeChoice() for _ in range(num_choices)]

    async def send(self) -> None:
        """Send the whole answer; see `Answer.send`."""
        while self._num_left and self._error is None:
            await self._wait_push()
        if self._error is not None:
            raise self._error
        await self._reply.send_json(await self._json())

    async def _json(self) -> str:
        parts, num_chars = [], 0
        for part in self._form.whole(self._returned()):
            parts.append(part)
            num_chars += len(part)
            if num_chars >= CHARS_PER_TURN:
                num_chars = 0
                await asyncio.sleep(0)
        return "".join(parts)

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
        for delta in deltas:
            self._wholes[index].add(delta)
        if not self._num_left:
            self._wake()
