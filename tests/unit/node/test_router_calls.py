"""The deadline of a call: it is that of this call alone, and ends with its answer or its stream."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.grammar import Grammar, GrammarKind
from common.nodes import Role
from node.inbox import Inbox
from node.messages import Accepted, Answer, Refused, Submit
from node.router_calls import Replies, RouterCalls
from protos import pdserve_node_pb2 as pb
from tests.fakes.stopped_time import StoppedTime
from tests.unit.node.control_server import REQUEST, ROUTER, reserve


class Calls:
    """The calls of one router, and what they were answered."""

    def __init__(self) -> None:
        self.time = StoppedTime()
        self.replies = Replies(asyncio.get_running_loop())
        self.inbox = Inbox(max_requests=9)
        self.answers: list[tuple[int, Answer]] = []
        self.prepared: list[Grammar] = []
        self.calls = RouterCalls(
            ROUTER, Role.DECODE, self.inbox, self.replies, self.time,
            answer=lambda call_id, answer: self.answers.append((call_id, answer)),
            prepare_grammar=self.prepared.append,
        )  # fmt: skip

    async def begin(self, deadline_s: float) -> Submit:
        """Take call 1."""
        request = reserve(replace(REQUEST, deadline_s=deadline_s))
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
    calls.replies.resolve(first.reply_to, Accepted())
    await calls.wait(0.0)
    await calls.begin(30.0)
    await calls.wait(20.0)
    assert calls.answers == [(1, Accepted())]
    await calls.wait(10.0)
    (_, late) = calls.answers
    assert isinstance(late[1], Refused)
    assert late[1].error.code == "deadline_exceeded"
    assert len(calls.replies) == 0


async def test_nobody_is_answered_when_the_stream_has_ended() -> None:
    calls = Calls()
    submit = await calls.begin(10.0)
    calls.calls.close()
    assert len(calls.replies) == 0
    calls.replies.resolve(submit.reply_to, Accepted())
    await calls.wait(20.0)
    assert calls.answers == []


async def test_a_grammar_is_prepared_when_its_request_arrives() -> None:
    calls = Calls()
    grammar = Grammar(GrammarKind.REGEX, "a")
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, grammar=grammar))
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=1, reserve=reserve(request))]))
    await calls.calls.take(pb.RouterMessage(calls=[pb.Call(id=2, reserve=reserve(REQUEST))]))
    assert calls.prepared == [grammar]
