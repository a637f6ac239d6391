"""The deadline of a call, which is its own, and the grammar that is compiled for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest

from common.errors import InvalidRequest, Overloaded
from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from node.control import router_calls
from node.control.pulls import pull_to_proto
from node.control.router_calls import IgnoredPriorities, Replies, RouterCalls
from node.flow import inbox
from node.flow.inbox import Inbox
from node.flow.messages import (
    Answer,
    AskBlocks,
    CallRefused,
    Compiled,
    FetchBlocks,
    PromptAccepted,
    PullRefused,
    SendBlocks,
    Submit,
    WarmNode,
)
from node.flow.pulls.hand_over import MOST_BLOCKS
from protos import pdserve_node_pb2 as pb
from protos.codec import request_to_proto
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.nodes.control_server import REQUEST, ROUTER, TICKET, reserve

UNDER_GRAMMAR = replace(
    REQUEST, sampling=replace(REQUEST.sampling, grammar=Grammar(GrammarKind.REGEX, "a"))
)


class Calls:
    """The calls of one router, and what they were answered."""

    def __init__(self, *, are_priorities_enabled: bool = False) -> None:
        self.time = StoppedTime()
        self.replies = Replies(asyncio.get_running_loop())
        self.inbox = Inbox(max_requests=9)
        self.answers: list[tuple[int, Answer]] = []
        self.prepared: list[Grammar] = []
        self.compiling: Future[None] | None = None
        self.calls = RouterCalls(
            ROUTER, self.inbox, self.replies, self.time,
            answer=lambda call_id, answer: self.answers.append((call_id, answer)),
            prepare_grammar=self.prepare,
            priorities=IgnoredPriorities(are_enabled=are_priorities_enabled),
        )  # fmt: skip

    def prepare(self, grammar: Grammar) -> Future[None] | None:
        """Note the grammar; it is compiled unless `compiling` is there."""
        self.prepared.append(grammar)
        return self.compiling

    async def begin(self, deadline_s: float, *, priority: int = 0) -> Submit:
        """Take call 1."""
        request = reserve(replace(REQUEST, deadline_s=deadline_s, priority=priority))
        await self.calls.take(pb.RouterMessage(calls=[pb.Call(id=1, reserve=request)]))
        (submit,) = self.inbox.take_all()
        assert isinstance(submit, Submit)
        return submit

    async def wait(self, by_s: float) -> None:
        """Let the time pass, and run what is due."""
        self.time.advance(by_s)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_later_call_of_the_same_number_has_a_deadline_of_its_own() -> None:
    calls = Calls()
    first = await calls.begin(10.0)
    calls.replies.resolve(first.reply_to, PromptAccepted())
    await calls.wait(0.0)
    await calls.begin(30.0)
    await calls.wait(20.0)
    assert calls.answers == [(1, PromptAccepted())]
    await calls.wait(10.0)
    (_, late) = calls.answers
    assert isinstance(late[1], CallRefused)
    assert late[1].error.code == "deadline_exceeded"
    assert len(calls.replies) == 0


async def test_pulls_are_queued_with_their_attempt_and_hashes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = Calls()
    ticket = replace(TICKET, attempt=AttemptId("r", 2))
    hashes = tuple(bytes([i]) * 16 for i in range(len(ticket.target_block_ids)))
    pull = pull_to_proto(AskBlocks(ROUTER, Incarnation("source", 7), ticket, hashes))
    assert (pull.source_id, pull.source_epoch) == ("source", 7)
    short = pull_to_proto(AskBlocks(ROUTER, Incarnation("source", 7), ticket, hashes[1:]))
    bare = pb.Pull(request_id="r", attempt=1)
    same = hashes[:1] * len(hashes)
    twice = pull_to_proto(AskBlocks(ROUTER, Incarnation("source", 7), ticket, same))
    await calls.calls.take(pb.RouterMessage(pulls=[pull, bare, short, twice]))
    (taken,) = calls.inbox.take_all()
    assert taken == SendBlocks(ROUTER, ticket, hashes)
    assert "a pull of router#1 is dropped: the ticket names no decode node" in caplog.text
    assert "a pull of router#1 is dropped: a pull of" in caplog.text
    assert f"{len(hashes)} hashes name 1 blocks: wanted each once" in caplog.text


async def test_that_nobody_answers_a_pull_is_queued() -> None:
    calls = Calls()
    await calls.calls.take(pb.RouterMessage(refused_pulls=[7, 9]))
    assert calls.inbox.take_all() == [PullRefused(7), PullRefused(9)]


@pytest.mark.covers("F97")
async def test_pulls_wait_for_room_in_the_inbox_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "MAX_BESIDE", 2)
    monkeypatch.setattr(router_calls, "FULL_INBOX_PAUSE_S", 0.0)
    calls = Calls()
    taking = asyncio.create_task(calls.calls.take(pb.RouterMessage(refused_pulls=range(1, 6))))
    taken = []
    while not taking.done():
        await asyncio.sleep(0)
        taken.append(calls.inbox.take_all())
    await taking
    taken.append(calls.inbox.take_all())
    assert [one for some in taken for one in some] == [PullRefused(token) for token in range(1, 6)]
    assert max(map(len, taken)) == 2


async def test_which_new_node_wants_blocks_is_queued(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()
    named = [pb.NewNode(node_id="m1", epoch=3), pb.NewNode()]
    await calls.calls.take(pb.RouterMessage(new_nodes=named))
    assert calls.inbox.take_all() == [WarmNode(ROUTER, Incarnation("m1", 3))]
    assert "a new node of router#1 is dropped" in caplog.text


async def test_what_a_node_that_leaves_has_is_queued(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()
    good = pb.Fetch(source_id="d0", source_epoch=7, block_hashes=b"a" * 16 + b"b" * 16)
    bad = [
        pb.Fetch(source_id="d0", block_hashes=b"a" * 15),
        pb.Fetch(source_id="d0", block_hashes=b"a" * 16 * (MOST_BLOCKS + 1)),
        pb.Fetch(block_hashes=b"a" * 16),
        pb.Fetch(source_id="d0", block_hashes=b"a" * 32),
    ]
    await calls.calls.take(pb.RouterMessage(fetches=[good, *bad]))
    (taken,) = calls.inbox.take_all()
    assert taken == FetchBlocks(ROUTER, Incarnation("d0", 7), (b"a" * 16, b"b" * 16))
    assert caplog.text.count("a fetch of router#1 is dropped") == len(bad)


async def test_a_prompt_comes_with_the_node_that_has_its_start() -> None:
    calls = Calls()
    source = pb.PrefixSource(
        node_id="source", epoch=7, num_tokens=640, num_disk_tokens=64, num_queued_tokens=4096
    )
    asked = pb.PrefillRequest(source=source)
    request_to_proto(REQUEST, asked.request)
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=1, prefill=asked)]))
    (submit,) = calls.inbox.take_all()
    assert isinstance(submit, Submit)
    assert submit.source == PrefixSource(Incarnation("source", 7), 640, 64, 4096)
    asked.source.node_id = ""
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=2, prefill=asked)]))
    ((_, refused),) = calls.answers
    assert isinstance(refused, CallRefused)
    assert str(refused.error) == "the source's node_id has 0 characters"


async def test_nobody_is_answered_when_the_stream_has_ended() -> None:
    calls = Calls()
    submit = await calls.begin(10.0)
    calls.calls.close()
    assert len(calls.replies) == 0
    calls.replies.resolve(submit.reply_to, PromptAccepted())
    await calls.wait(20.0)
    assert calls.answers == []


async def test_a_grammar_is_prepared_when_its_request_arrives() -> None:
    calls = Calls()
    grammar = UNDER_GRAMMAR.sampling.grammar
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=1, reserve=reserve(UNDER_GRAMMAR))]))
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=2, reserve=reserve(REQUEST))]))
    assert calls.prepared == [grammar]
    assert [getattr(one, "is_compiling", None) for one in calls.inbox.take_all()] == [False, False]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, None),
        (InvalidRequest("too much work"), "invalid_request"),
        (RuntimeError("a bug"), "internal_error"),
    ],
)
@pytest.mark.parametrize("is_early", [False, True])
async def test_the_end_of_a_compilation_follows_the_call(
    error: Exception | None, code: str | None, is_early: bool
) -> None:
    calls = Calls()
    calls.compiling = compiling = Future[None]()

    def end() -> None:
        if error is None:
            compiling.set_result(None)
        else:
            compiling.set_exception(error)

    if is_early:
        end()
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=1, reserve=reserve(UNDER_GRAMMAR))]))
    if not is_early:
        (submit,) = calls.inbox.take_all()
        end()
        (compiled,) = calls.inbox.take_all()
    else:
        submit, compiled = calls.inbox.take_all()
    assert isinstance(submit, Submit)
    assert isinstance(compiled, Compiled)
    assert submit.is_compiling
    assert (compiled.attempt, compiled.reply_to) == (submit.request.id, submit.reply_to)
    assert (compiled.error and compiled.error.code) == code


async def test_a_call_is_refused_while_too_many_grammars_wait() -> None:
    calls = Calls()

    def refuse(grammar: Grammar) -> Future[None] | None:
        raise Overloaded("256 grammars wait to be compiled")

    calls.calls._prepare_grammar = refuse
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=1, reserve=reserve(UNDER_GRAMMAR))]))
    ((_, answer),) = calls.answers
    assert isinstance(answer, CallRefused)
    assert answer.error.code == "overloaded"
    assert calls.inbox.take_all() == []
    assert len(calls.replies) == 0


@pytest.mark.parametrize("are_enabled", [False, True])
async def test_priorities_that_do_not_count_are_told_once(
    are_enabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls(are_priorities_enabled=are_enabled)
    for priority, num_told in ((0, 0), (7, 1), (-3, 1)):
        submit = await calls.begin(10.0, priority=priority)
        calls.replies.resolve(submit.reply_to, PromptAccepted())
        await calls.wait(0.0)
        told = [text for text in caplog.messages if "--enable-priority-scheduling" in text]
        assert len(told) == (0 if are_enabled else num_told)
        assert all("the priority 7" in text for text in told)
