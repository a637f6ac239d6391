"""An answer on its way to its client: the same bytes in the same order at any pace."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from common.errors import InternalError, NodeLost
from common.request import FinishReason
from router.api.answers.answer import PING_S, Answer, AnswerTurns, StreamedAnswer, WholeAnswer
from router.api.answers.chat_and_completions import AnswerHead, ChatFormat, WholeChoice
from router.core.generation import Sink, TokenChunk
from router.http.exchange import Reply
from router.http.sse import PING
from router.text.output.choice_text import ChoiceText, Delta
from router.text.output.usage import Usage, UsageEvents
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.edge_model import tiny_model
from tests.support.http.scripted_generator import chunks

TEXT = "Hello world, the quick brown fox \U0001f600"
HEAD = AnswerHead(id="chatcmpl-1", created_s=1, model="tiny", system_fingerprint="f")


class Client:
    """An answer and its client, where parts written directly and sent ones arrive as one."""

    def __init__(
        self,
        num_choices: int = 1,
        kind: type[Answer] = StreamedAnswer,
        stop: Sequence[str] = (),
        *,
        has_logprobs: bool = False,
    ) -> None:
        self.body = b""
        self.messages: list[Message] = []
        self.num_written = 0
        self.keeps_up = True
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.deltas: list[Delta] = []
        self.sinks: list[Sink] = []
        self.aborted: list[int] = []
        self.usage = Usage((3,), num_choices)
        self.form = ChatFormat(
            HEAD,
            tiny_model().describe_token,
            usage=self.usage,
            has_logprobs=has_logprobs,
            usage_events=UsageEvents.LAST,
        )
        reply = Reply(self._send, self._write)
        more: dict[str, int] = {"best_of": 1, "num_best": 1}
        if kind is StreamedAnswer:
            more = {"has_logprobs": has_logprobs}
        self.answer = kind(self.form, self.usage, reply, num_choices, AnswerTurns(), **more)
        for index in range(num_choices):
            text = ChoiceText(tiny_model().new_detokenizer(), stop, has_logprobs=has_logprobs)
            choice = self.answer.new_choice(text, self.deltas.extend)
            choice.abort_by(self._run(index, choice))

    def _run(self, index: int, sink: Sink) -> Callable[[], None]:
        self.sinks.append(sink)
        return partial(self.aborted.append, index)

    def push(self, index: int, parts: Sequence[TokenChunk]) -> None:
        """Push parts that came together into one choice, as a dispatcher does."""
        self.sinks[index].on_chunks(parts)
        self.sinks[index].send_now()

    async def _send(self, message: Message) -> None:
        await self.may_read.wait()
        self.messages.append(message)
        self.body += message.get("body", b"")

    def _write(self, part: bytes) -> bool:
        if self.keeps_up and self.may_read.is_set():
            assert self.messages, "a part before the status"
            self.body += part
            self.num_written += bool(part)
            return True
        return False

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def read(self, parts: Sequence[TokenChunk]) -> bytes:
        """Push `parts` one at a time into the only choice; the whole body."""
        sending = asyncio.create_task(self.answer.send())
        for part in parts:
            await self.turn()
            self.push(0, [part])
        await sending
        return self.body


def answer(text: str = TEXT) -> list[TokenChunk]:
    return chunks(tiny_model().encode(text, add_special_tokens=False, param="text"))


async def test_tokens_behind_the_first_are_written_without_waking_a_task() -> None:
    client = Client()
    body = await client.read(answer())
    assert body.endswith(b"data: [DONE]\n\n")
    starts, sent = client.messages[0], client.messages[1:]
    assert starts["status"] == 200
    # The first event with the status, the last with the end; every other one was written.
    assert [message["more_body"] for message in sent] == [False]
    assert client.num_written >= len([d for d in client.deltas if d.text]) - 1


@given(
    st.lists(
        st.sampled_from(["keeps up", "keeps up at once", "waits", "stuck"]), min_size=1, max_size=9
    )
)
def test_the_body_is_the_same_at_any_pace(paces: list[str]) -> None:
    async def run() -> None:
        wanted, client = Client(), Client()
        body = await wanted.read(answer())
        sending = asyncio.create_task(client.answer.send())
        for index, part in enumerate(answer()):
            pace = paces[index % len(paces)]
            client.keeps_up = pace in ("keeps up", "keeps up at once")
            if pace == "stuck":
                client.may_read.clear()
            else:
                client.may_read.set()
            if pace != "keeps up at once":  # else the task has not run since the last push
                await client.turn()
            client.push(0, [part])
        client.may_read.set()
        await sending
        assert client.body == body
        assert client.deltas == wanted.deltas
        assert client.usage.as_json() == wanted.usage.as_json()

    asyncio.run(run())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.booleans())
def test_chunks_pushed_together_say_the_same(sizes: list[int], may_read: bool) -> None:
    async def run() -> None:
        body, client, parts = await Client().read(answer()), Client(), answer()
        sending = asyncio.create_task(client.answer.send())
        while parts:
            if may_read:
                await client.turn()
            size = sizes[len(parts) % len(sizes)]
            client.push(0, parts[:size])
            del parts[:size]
        await sending
        assert client.body == body

    asyncio.run(run())


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
async def test_the_end_of_an_answer_travels_with_its_last_token(finish: FinishReason) -> None:
    client = Client()
    first, second = answer()[:2]
    await client.read([first, second._replace(finish_reason=finish)])
    last = client.messages[-1]
    assert not last["more_body"]
    assert f'"finish_reason":"{finish.value}"'.encode() in last["body"]
    assert last["body"].endswith(b"data: [DONE]\n\n")


async def test_choices_that_were_pushed_together_are_one_part() -> None:
    client = Client(2)
    sending = asyncio.create_task(client.answer.send())
    first, second = answer("Hello world, good night")[:2]
    client.push(0, [first])
    client.push(1, [first])
    await client.turn()
    body, num_written = client.body, client.num_written
    for sink in client.sinks:
        sink.on_chunks([second])
    assert client.num_written == num_written, "others are pushed to first"
    for sink in client.sinks:
        sink.send_now()
    assert client.num_written == num_written + 1
    assert client.body[len(body) :].count(b"data: ") == 2
    sending.cancel()


async def test_a_choice_that_is_over_is_aborted_before_the_client_has_read_it() -> None:
    client = Client(2, stop=("world",))
    client.may_read.clear()
    sending = asyncio.create_task(client.answer.send())
    await client.turn()
    client.push(1, answer("Hello world, good night"))
    assert client.aborted == [1]
    client.push(1, answer("more"))
    client.push(0, answer("quick fox"))
    assert client.aborted == [1, 0]
    client.may_read.set()
    await sending
    assert b"Hello" in client.body
    assert b"night" not in client.body
    assert b"more" not in client.body


async def test_what_was_pushed_before_a_failure_is_sent_before_it_is_raised() -> None:
    client = Client(2)
    client.may_read.clear()
    sending = asyncio.create_task(client.answer.send())
    await client.turn()
    client.push(0, answer("Hello world")[:1])
    client.sinks[1].on_failed(NodeLost("gone"))
    client.push(0, answer("Hello world")[1:2])
    client.sinks[0].on_failed(InternalError("later"))
    client.may_read.set()
    with pytest.raises(NodeLost):
        await sending
    assert b"Hello" in client.body
    assert b"world" not in client.body, "it came behind the failure"


@pytest.mark.covers("F88")
async def test_a_client_that_does_not_read_is_sent_one_ping() -> None:
    time, client = StoppedTime(), Client()
    sending = asyncio.create_task(client.answer.send())
    client.sinks[0].on_accepted()
    await client.turn()
    client.may_read.clear()
    for _ in range(9):
        time.advance(PING_S)
        await client.turn()
    client.may_read.set()
    await client.turn()
    assert client.body == PING
    client.push(0, answer())
    await sending
    assert client.body.endswith(b"data: [DONE]\n\n")


async def test_an_aborted_answer_sends_no_ping() -> None:
    time, client = StoppedTime(), Client()
    sending = asyncio.create_task(client.answer.send())
    client.sinks[0].on_accepted()
    await client.turn()
    client.answer.abort()
    time.advance(3 * PING_S)
    await client.turn()
    assert client.body == b""
    sending.cancel()


@pytest.mark.parametrize("kind", [StreamedAnswer, WholeAnswer])
async def test_a_failure_before_send_waits_is_raised(kind: type[Answer]) -> None:
    client = Client(kind=kind)
    client.sinks[0].on_failed(NodeLost("gone"))
    with pytest.raises(NodeLost):
        await client.answer.send()
    assert client.messages == []


@pytest.mark.parametrize("kind", [StreamedAnswer, WholeAnswer])
async def test_a_failure_behind_the_end_of_a_choice_is_dropped(kind: type[Answer]) -> None:
    """A stop string ends a choice whose node fails in the same batch of outputs."""
    client = Client(2, kind=kind, stop=("world",))
    sending = asyncio.create_task(client.answer.send())
    await client.turn()
    client.push(0, answer("Hello world, good night"))
    client.sinks[0].on_failed(NodeLost("gone"))
    await client.turn()
    client.push(1, answer("quick fox"))
    await sending
    assert client.body.count(b'"finish_reason":"') == 2


@pytest.mark.parametrize("kind", [StreamedAnswer, WholeAnswer])
async def test_an_answer_whose_last_part_cannot_be_made_is_not_complete(
    kind: type[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise KeyError("bug")

    client = Client(kind=kind)
    first, *rest = answer()
    client.push(0, [first])
    monkeypatch.setattr(ChatFormat, "events", broken)
    monkeypatch.setattr(WholeChoice, "add", broken)
    client.push(0, rest)
    with pytest.raises(KeyError):
        await client.answer.send()
    assert b"[DONE]" not in client.body


@pytest.mark.parametrize("kind", [StreamedAnswer, WholeAnswer])
async def test_a_choice_that_cannot_be_shown_fails_the_answer(kind: type[Answer]) -> None:
    client = Client(kind=kind, has_logprobs=True)
    client.push(0, answer()[:1])
    client.push(0, answer()[1:2])
    with pytest.raises(InternalError, match="logprobs"):
        await client.answer.send()
    client.answer.abort()
    assert client.aborted == [0]


async def test_a_whole_answer_is_sent_when_every_choice_is_over() -> None:
    client = Client(2, kind=WholeAnswer)
    sending = asyncio.create_task(client.answer.send())
    client.push(0, answer("Hello"))
    await client.turn()
    assert client.messages == []
    client.push(1, answer("world"))
    await sending
    assert client.messages[0]["status"] == 200
    assert client.body.index(b"Hello") < client.body.index(b"world")


async def test_a_long_whole_answer_becomes_json_in_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """128 choices that repeat a long prompt would hold up everybody's tokens."""
    bodies, turns = [], []
    for chars_per_turn in (1 << 20, 40):
        monkeypatch.setattr("router.api.answers.answer.CHARS_PER_TURN", chars_per_turn)
        client = Client(num_choices=9, kind=WholeAnswer)
        for sink in client.sinks:
            sink.on_chunks(answer())
        sending = asyncio.create_task(client.answer.send())
        turns.append(0)
        while not client.messages:
            await asyncio.sleep(0)
            turns[-1] += 1
        await sending
        bodies.append(client.body)
    assert bodies[0] == bodies[1]
    whole = json.loads(bodies[0])
    assert [choice["index"] for choice in whole["choices"]] == list(range(9))
    assert {choice["message"]["content"] for choice in whole["choices"]} == {TEXT}
    assert whole["usage"]["prompt_tokens"] == 3
    assert turns[1] - turns[0] >= 9


@pytest.mark.parametrize("is_over", [True, False])
async def test_an_aborted_answer_is_freed_without_the_garbage_collector(is_over: bool) -> None:
    client = Client()
    text = ChoiceText(tiny_model().new_detokenizer(), ())
    owned = StreamedAnswer(client.form, client.usage, Reply(client._send), 1, AnswerTurns())
    sinks: list[Sink] = []

    def generate(sink: Sink) -> Callable[[], None]:
        sinks.append(sink)
        return lambda: client.aborted.append(sink is None)  # as a generator's, it holds the sink

    gc.disable()
    try:
        choice = owned.new_choice(text, client.deltas.extend)
        choice.abort_by(generate(choice))
        del choice
        if is_over:
            sinks[0].on_chunks(answer())
        owned.abort()
        left = ref(sinks.pop())
        assert len(client.aborted) == 1
        assert left() is None
    finally:
        gc.enable()
