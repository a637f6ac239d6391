"""What waits to be sent to a node, and which messages it leaves in."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.ids import AttemptId, Incarnation
from protos import pdserve_node_pb2 as pb
from router.dispatch.client.stream_calls import BYTES_PER_MESSAGE, CALLS_PER_MESSAGE, UnsentCalls


def asks(unsent: UnsentCalls, name: str, num_tokens: int = 1) -> None:
    def write(call: pb.Call) -> None:
        call.reserve.request.request_id = name
        call.reserve.request.prompt_token_ids.extend([1] * num_tokens)

    unsent.add_call(write)


def messages(unsent: UnsentCalls) -> list[list[str]]:
    """The calls of each message, by the request's name; all that waits is taken."""
    found = []
    while unsent:
        found.append([call.reserve.request.request_id for call in unsent.next_message().calls])
    return found


@pytest.fixture
async def unsent() -> UnsentCalls:
    return UnsentCalls(Incarnation("d0", 1))


async def test_calls_leave_in_their_order_and_in_one_message(unsent: UnsentCalls) -> None:
    names = [f"r{number}" for number in range(5)]
    for name in names:
        asks(unsent, name)
    assert messages(unsent) == [names]


async def test_a_message_has_a_bounded_number_of_calls(unsent: UnsentCalls) -> None:
    for number in range(CALLS_PER_MESSAGE + 3):
        asks(unsent, f"r{number}")
    assert [len(calls) for calls in messages(unsent)] == [CALLS_PER_MESSAGE, 3]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([0.4] * 6, [3, 3]),
        ([1.1, 0.1, 0.1], [1, 2]),
        ([0.1, 1.1, 0.1], [2, 1]),
        ([0.6, 0.6, 0.6, 0.6], [2, 2]),
    ],
    ids=str,
)
async def test_long_calls_get_few_others_into_their_message(
    unsent: UnsentCalls, lengths: list[float], sizes: list[int]
) -> None:
    for number, length in enumerate(lengths):
        asks(unsent, f"r{number}", round(length * BYTES_PER_MESSAGE))
    assert [len(calls) for calls in messages(unsent)] == sizes


async def test_what_was_taken_gets_no_further_call(unsent: UnsentCalls) -> None:
    asks(unsent, "r0", BYTES_PER_MESSAGE)
    taken = unsent.next_message()
    asks(unsent, "r1")
    asks(unsent, "r2")
    assert len(taken.calls) == 1
    assert messages(unsent) == [["r1", "r2"]]


@pytest.mark.parametrize("num_before", [0, 1, 2])
async def test_a_call_that_cannot_be_written_leaves_nothing(
    unsent: UnsentCalls, num_before: int
) -> None:
    def refuse(call: pb.Call) -> None:
        call.reserve.request.request_id = "half"
        raise InvalidRequest("a number does not fit the wire")

    names = [f"r{number}" for number in range(num_before)]
    for name in names:
        asks(unsent, name)
    with pytest.raises(InvalidRequest, match="does not fit"):
        unsent.add_call(refuse)
    assert bool(unsent) is bool(num_before)
    asks(unsent, "next")
    assert messages(unsent) == [[*names, "next"]]


async def test_an_abort_leaves_behind_every_call(unsent: UnsentCalls) -> None:
    unsent.add_abort(AttemptId("r0", 1))
    for number in range(CALLS_PER_MESSAGE + 1):
        asks(unsent, f"r{number}")
    first, second = unsent.next_message(), unsent.next_message()
    assert not first.aborts.request_ids
    assert list(second.aborts.request_ids) == ["r0"]
    assert len(second.calls) == 1


async def test_nothing_is_left_when_all_is_dropped(unsent: UnsentCalls) -> None:
    asks(unsent, "r0")
    unsent.add_abort(AttemptId("r0", 1))
    unsent.add_pull(pb.Pull())
    unsent.add_refused_pull(1)
    unsent.add_fetch(pb.Fetch())
    unsent.add_new_node(pb.NewNode())
    unsent.set_echo(7, 250)
    unsent.ask_blocks()
    unsent.clear()
    assert not unsent
    assert unsent.next_message() == pb.RouterMessage()
    await unsent.wait_sent()
