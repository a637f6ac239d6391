"""Results come after the calls that they are of: most chat templates write no ids."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from router.tools.earlier_calls import with_results_in_order
from router.tools.plain_messages import plain_messages
from tests.support.http.http_edge import make_edge
from tests.support.http.scripted_generator import says
from tests.support.http.tool_models import HERMES_TEMPLATE, model_with

ASKED: dict[str, Any] = {"role": "user", "content": "Weather?"}
CITIES = ("Paris", "Rome", "Oslo")


def calls(*ids: str) -> dict[str, Any]:
    made = [
        {
            "id": one,
            "type": "function",
            "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for one, city in zip(ids, CITIES, strict=False)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(of: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": of}


def ordered(*messages: dict[str, Any]) -> list[str]:
    """The contents, in order; that of calls is 'calls'."""
    return [one["content"] or "calls" for one in with_results_in_order(messages)]


@pytest.mark.covers("J26")
@pytest.mark.parametrize("order", list(permutations("abc")))
def test_results_come_in_the_order_of_their_calls(order: tuple[str, ...]) -> None:
    results = [result(one, one) for one in order]
    assert ordered(ASKED, calls(*"abc"), *results) == ["Weather?", "calls", "a", "b", "c"]


@pytest.mark.covers("J26")
def test_what_stands_between_a_call_and_its_result_comes_behind_it() -> None:
    told = {"role": "system", "content": "Be brief."}
    found = ordered(ASKED, calls(*"ab"), result("b", "b"), told, ASKED, result("a", "a"))
    assert found == ["Weather?", "calls", "a", "b", "Be brief.", "Weather?"]


@pytest.mark.covers("J26")
def test_a_result_is_that_of_the_last_call_with_its_id_and_no_result() -> None:
    """Some servers number the calls of each answer anew."""
    first = [calls(*"ab"), result("b", "1b"), result("a", "1a")]
    second = [calls(*"ab"), result("b", "2b"), result("a", "2a")]
    assert ordered(*first, *second) == ["calls", "1a", "1b", "calls", "2a", "2b"]
    twice = [calls(*"aa"), result("a", "first"), result("a", "second")]
    assert ordered(*twice) == ["calls", "first", "second"]


@pytest.mark.covers("J26")
def test_a_result_that_is_lost_has_its_place() -> None:
    """Otherwise the next one would be taken for it."""
    found = ordered(ASKED, calls(*"abc"), result("b", "b"), ASKED)
    assert found == ["Weather?", "calls", "[no result]", "b", "Weather?"]
    assert ordered(ASKED, calls(*"ab"), ASKED) == ["Weather?", "calls", "Weather?"]
    (_, lost, _) = with_results_in_order([calls(*"ab"), result("b", "b")])
    assert lost == {"role": "tool", "content": "[no result]", "tool_call_id": "a"}


def test_a_result_of_no_call_stays_where_it_is() -> None:
    messages = [ASKED, result("x", "x"), calls(*"ab"), result(None, "n"), result("y", "y")]
    assert ordered(*messages) == ["Weather?", "x", "calls", "n", "y"]
    again = [calls(*"a"), result("a", "a"), result("a", "again"), ASKED]
    assert ordered(*again) == ["calls", "a", "again", "Weather?"]
    more = [calls(*"a"), result("a", "a"), ASKED, result(None, "n"), calls(*"b")]
    assert ordered(*more) == ["calls", "a", "Weather?", "n", "calls"]


@pytest.mark.covers("J26")
def test_a_result_without_an_id_is_that_of_a_call_without_one_of_its_own() -> None:
    """Also where the results that have an id come later, or the call has none either."""
    for results in (
        [result(None, "a"), result("b", "b"), result(None, "c")],
        [result("b", "b"), result(None, "a"), ASKED, result(None, "c")],
        [result(None, "a"), result(None, "c"), result("b", "b")],
    ):
        expected = ["calls", "a", "b", "c", *(["Weather?"] if ASKED in results else [])]
        assert ordered(calls(*"abc"), *results) == expected
    nameless = calls(*"ab")
    del nameless["tool_calls"][0]["id"]
    assert ordered(nameless, result("b", "b"), result(None, "a")) == ["calls", "a", "b"]
    first = [calls(*"ab"), result(None, "1a"), result(None, "1b"), ASKED]
    again = [calls(*"ab"), result(None, "2a"), result(None, "2b")]
    both = ["calls", "1a", "1b", "Weather?", "calls", "2a", "2b"]
    assert ordered(*first, *again) == both


def test_a_result_without_an_id_gets_that_of_its_call() -> None:
    """Templates that know no calls have the functions' names from there."""
    (_, *results) = with_results_in_order([calls(*"ab"), result("b", "b"), result(None, "a")])
    assert [one["tool_call_id"] for one in results] == ["a", "b"]


@pytest.mark.covers("J26")
def test_a_result_without_an_id_is_that_of_a_call_of_its_name() -> None:
    """Clients that send no ids may send names, in the order in which the results come."""
    called = calls(*"abc")
    for call, name in zip(called["tool_calls"], ("weather", "time", "weather"), strict=True):
        call["function"]["name"] = name
    results = [
        {"role": "tool", "content": text, "name": name}
        for text, name in (("b", "time"), ("a", "weather"), ("c", "weather"), ("d", "other"))
    ]
    found = with_results_in_order([called, *results])
    assert [(one["content"], one.get("tool_call_id")) for one in found[1:]] == [
        ("a", "a"), ("b", "b"), ("c", "c"), ("d", None),
    ]  # fmt: skip
    (_, told) = plain_messages([called | {"content": ""}, *found[1:]], [])
    names = [line for line in told["content"].splitlines() if line.startswith("Result of")]
    assert names == [f"Result of {one}:" for one in ("weather", "time", "weather", "other")]


def functions(*ids: str) -> list[dict[str, Any]]:
    """Calls as `/v1/responses` has them."""
    made = calls(*ids)["tool_calls"]
    return [{"type": "function_call", "call_id": one["id"], **one["function"]} for one in made]


def outputs(*ids: str) -> list[dict[str, Any]]:
    kind = "function_call_output"
    return [{"type": kind, "call_id": one, "output": f"of {one}"} for one in ids]


def uses(*ids: str) -> dict[str, Any]:
    """Calls as `/v1/messages` has them."""
    named = zip(ids, CITIES, strict=False)
    made = [
        {"type": "tool_use", "id": one, "name": "get_weather", "input": {"city": city}}
        for one, city in named
    ]
    return {"role": "assistant", "content": made}


def tool_results(*ids: str) -> dict[str, Any]:
    made = [{"type": "tool_result", "tool_use_id": one, "content": f"of {one}"} for one in ids]
    return {"role": "user", "content": made}


@pytest.mark.covers("J26")
@pytest.mark.parametrize("tool_template", ["auto", "builtin"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [ASKED, calls(*"abc"), *(result(one, f"of {one}") for one in "bca")]},
        ),
        ("/v1/responses", {"input": [ASKED, *functions(*"abc"), *outputs(*"cab")]}),
        ("/v1/messages", {"messages": [ASKED, uses(*"abc"), tool_results(*"cba")]}),
    ],
)
async def test_results_of_every_api_come_in_the_order_of_their_calls(
    path: str, body: dict[str, Any], tool_template: str
) -> None:
    template = HERMES_TEMPLATE if tool_template == "auto" else None
    edge = make_edge(says("Warm."), model=model_with(template))
    async with edge.client() as client:
        reply = await client.post(path, json={"max_tokens": 9, **body})
    assert reply.status_code == 200, reply.text
    prompt = edge.model.decode(edge.generator.calls[0].prompt_token_ids)
    places = [prompt.index(text) for text in (*CITIES, "of a", "of b", "of c")]
    assert places == sorted(places)
