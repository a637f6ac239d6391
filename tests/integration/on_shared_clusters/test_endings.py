"""Every way a request can end, through HTTP: the answer is right, and nothing is held afterwards.

The fixture's closing check is half of every test here.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import CHAT, COMPLETIONS, Api, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.topologies import LONG_DEADLINE_S, PREFILL_STEP_TOKENS
from tests.support.models.tiny_model import BOS_TOKEN_ID, END_TOKEN_ID, prompt_tokens, token_id

GREEDY: Fields = {"temperature": 0, "ignore_eos": True}
LONG_PROMPT = 6000
"""Nearly two hundred steps on the prefill node."""
ENDLESS = 9000
"""Output tokens that no test waits for."""


@pytest.mark.covers("F39")
def test_the_first_token_may_be_the_end_of_sequence(tiny_api: Api) -> None:
    answer = tiny_api.complete([*prompt_tokens(20), END_TOKEN_ID], temperature=0, max_tokens=50)
    assert (answer.text, answer.finish_reason) == ("", "stop")
    assert answer.usage["completion_tokens"] == 1


def test_ignore_eos_goes_on_after_it(tiny_api: Api) -> None:
    prompt = [*prompt_tokens(20), END_TOKEN_ID]
    answer = tiny_api.complete(prompt, max_tokens=9, **GREEDY)
    assert (answer.usage["completion_tokens"], answer.finish_reason) == (9, "length")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 200])
def test_a_stop_token_may_come_first_or_later(tiny_api: Api, length: int) -> None:
    prompt = prompt_tokens(length, salt=1)
    whole = tiny_api.complete(prompt, max_tokens=12, **GREEDY)
    for place in (0, 1, 7):
        stop = whole.tokens[place]
        first = whole.tokens.index(stop)
        answer = tiny_api.complete(prompt, max_tokens=12, stop_token_ids=[token_id(stop)], **GREEDY)
        assert answer.finish_reason == "stop"
        assert answer.text == "".join(whole.tokens[:first]).replace("<eos>", "")
        assert answer.usage["completion_tokens"] == first + 1


@pytest.mark.parametrize("length", [1, 16, 100])
def test_one_token_is_the_first_of_many(tiny_api: Api, length: int) -> None:
    prompt = prompt_tokens(length, salt=2)
    one = tiny_api.complete(prompt, max_tokens=1, **GREEDY)
    many = tiny_api.complete(prompt, max_tokens=5, **GREEDY)
    assert one.tokens == many.tokens[:1]
    assert one.finish_reason == many.finish_reason == "length"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_cuts_across_tokens(tiny_api: Api, is_stream: bool) -> None:
    prompt = prompt_tokens(40, salt=3)
    whole = tiny_api.complete(prompt, max_tokens=60, **GREEDY).text
    stop = whole[20:24]
    fields: Fields = {"max_tokens": ENDLESS, "stop": ["never in it", stop], **GREEDY}
    if is_stream:
        with tiny_api.stream(prompt=prompt, **fields) as stream:
            answer = stream.read_rest()
    else:
        answer = tiny_api.complete(prompt, **fields)
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]


@pytest.mark.covers("T24")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_that_names_a_special_token_ends_the_answer(
    tiny_api: Api, is_stream: bool
) -> None:
    """The token has no text; nothing else would end this answer before its limit."""
    fields: Fields = {"prompt": prompt_tokens(40, salt=3), "max_tokens": ENDLESS, **GREEDY}
    fields |= {"logit_bias": {str(BOS_TOKEN_ID): 100}, "stop": ["never in it", "<bos>"]}
    if is_stream:
        with tiny_api.stream(**fields) as stream:
            answer = stream.read_rest()
    else:
        answer = tiny_api.complete(**fields)
        assert answer.usage["completion_tokens"] == 1
    assert (answer.text, answer.finish_reason) == ("", "stop")


@pytest.mark.covers("F140")
def test_choices_are_drawn_apart_and_the_first_is_the_only_one_s(tiny_api: Api) -> None:
    fields: Fields = {
        "prompt": prompt_tokens(33, salt=4),
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 5,
    }
    three = tiny_api.ask(COMPLETIONS, {"n": 3, **fields})
    (one,) = tiny_api.ask(COMPLETIONS, fields)
    assert one == three[0]
    assert len({choice.text for choice in three}) == 3
    assert three[0].usage["prompt_tokens"] == 33


@pytest.mark.covers("T34")
def test_logprobs_name_the_drawn_token_and_its_rivals(tiny_api: Api) -> None:
    messages = [{"role": "user", "content": "hello"}]
    fields: Fields = {
        "messages": messages,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 4,
        **GREEDY,
    }
    body = tiny_api.http.post(CHAT, json={"model": "tiny", **fields}).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        top = entry["top_logprobs"]
        assert len(top) == 4
        assert top[0]["token"] == entry["token"], "greedy takes the likeliest"
        assert entry["logprob"] == top[0]["logprob"] <= 0
        assert [t["logprob"] for t in top] == sorted((t["logprob"] for t in top), reverse=True)


def test_a_stream_says_what_the_whole_answer_says(tiny_api: Api) -> None:
    prompt = prompt_tokens(50, salt=6)
    whole = tiny_api.complete(prompt, max_tokens=30, **GREEDY)
    fields: Fields = {"max_tokens": 30, "stream_options": {"include_usage": True}, **GREEDY}
    with tiny_api.stream(prompt=prompt, logprobs=0, **fields) as stream:
        streamed = stream.read_rest()
    assert streamed == whole
    assert streamed.usage["completion_tokens"] == 30
    assert streamed.usage["prompt_tokens"] == 50


@pytest.mark.covers("F58")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_during_prefill_frees_everything(
    tiny_cluster: Cluster, tiny_api: Api, is_stream: bool
) -> None:
    steps_before = tiny_cluster.status("prefill-1").num_steps
    prompt = prompt_tokens(LONG_PROMPT, salt=7 + is_stream)
    with tiny_cluster.slow():
        # However long this test stands still, the first of many steps has not ended.
        with tiny_cluster.hung("prefill-1"):
            with hanging_request(tiny_cluster, prompt=prompt, stream=is_stream, max_tokens=20):
                wait_busy(tiny_cluster, "prefill-1")
            wait_until(lambda: num_running(tiny_api) == 0, "the router has given it up")
        tiny_cluster.check_settled()
    num_steps = tiny_cluster.status("prefill-1").num_steps - steps_before
    assert num_steps < LONG_PROMPT // PREFILL_STEP_TOKENS, "the prompt was given up, not finished"


@pytest.mark.covers("F58")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_during_decode_frees_everything(
    tiny_cluster: Cluster, is_stream: bool
) -> None:
    prompt = prompt_tokens(40, salt=9)
    fields: Fields = {"prompt": prompt, "stream": is_stream, "max_tokens": ENDLESS, **GREEDY}
    with tiny_cluster.slow():
        with hanging_request(tiny_cluster, **fields):
            wait_busy(tiny_cluster, "decode-1")
        tiny_cluster.check_settled()


def test_a_client_that_leaves_before_it_asked_for_all_is_forgotten(tiny_cluster: Cluster) -> None:
    with connect(tiny_cluster) as client:
        client.sendall(request_head(10_000) + b'{"model": "ti')
    with connect(tiny_cluster) as client:
        client.sendall(b"POST /v1/comp")


@pytest.mark.covers("F89")
@pytest.mark.parametrize("length", [40, LONG_PROMPT])
def test_the_deadline_ends_a_request_with_504(tiny_cluster: Cluster, length: int) -> None:
    fields: Fields = {"max_tokens": ENDLESS, **GREEDY}
    with tiny_cluster.slow(), Api(tiny_cluster.urls[2], "tiny") as api:
        started_at_s = time.monotonic()
        with pytest.raises(ApiFailure) as failure:
            api.complete(prompt_tokens(length, salt=11), **fields)
        assert time.monotonic() - started_at_s < LONG_DEADLINE_S / 2
    error = failure.value.error
    assert (error.status, error.code, error.kind) == (504, "deadline_exceeded", "server_error")


@pytest.mark.covers("F90")
def test_the_deadline_ends_a_stream_with_an_error_event(tiny_cluster: Cluster) -> None:
    with tiny_cluster.slow(), Api(tiny_cluster.urls[2], "tiny") as api:
        prompt = prompt_tokens(10, salt=12)
        # It is a status where the machine stalls for so long that no node has accepted by then.
        with pytest.raises(ApiFailure) as failure:
            read_to_the_end(api, prompt=prompt, max_tokens=ENDLESS, **GREEDY)
    assert failure.value.error.code == "deadline_exceeded"


def read_to_the_end(api: Api, **fields: Any) -> None:
    """Read a stream; nothing follows its error."""
    with api.stream(**fields) as stream:
        try:
            stream.read_rest()
        finally:
            assert stream.read_event() is None
            assert stream.is_done, "nothing follows"


def connect(cluster: Cluster) -> socket.socket:
    """A connection to the first router, as bare as it gets."""
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request_head(num_bytes: int) -> bytes:
    lines = (
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


def hanging_request(cluster: Cluster, **fields: Any) -> socket.socket:
    """A request whose answer nobody reads; closing the socket hangs up."""
    body = json.dumps({"model": "tiny", **fields}).encode()
    client = connect(cluster)
    client.sendall(request_head(len(body)) + body)
    return client


def num_running(api: Api) -> int:
    """Requests that the router has in progress."""
    running: int = api.http.get("/v1/cluster").json()["router"]["num_running"]
    return running


def wait_busy(cluster: Cluster, node_id: str) -> None:
    """Return in the middle of the node's work on a request."""
    cluster.wait_status(node_id, lambda status: status.blocks.running > 0, "runs a request")
