"""What clients and strangers send that is wrong: a clear error, and everybody else is undisturbed.

On the real cluster: every rule is checked somewhere, at the edge or on a node, and none may leave
anything held.
"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.cluster.api import CHAT, COMPLETIONS, Api, ApiError, ApiFailure, Fields
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.topologies import flag
from tests.support.models.tiny_model import VOCAB_SIZE, byte_tokens, prompt_tokens

MIB = 1 << 20
USER = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2, **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": USER, "max_tokens": 2, **fields}).encode()


# Path, body, status, the field at fault, a word that the message must have.
CASES: dict[str, tuple[str, bytes, int, str | None, str]] = {
    "no body": (COMPLETIONS, b"", 400, None, "JSON"),
    "not JSON": (COMPLETIONS, b"{", 400, None, "JSON"),
    "not an object": (COMPLETIONS, b"[1]", 400, None, "object"),
    "invalid UTF-8": (COMPLETIONS, b'{"model": "tiny", "prompt": "\xff\xfe"}', 400, None, "UTF-8"),
    "lone surrogate": (CHAT, b'{"model": "tiny", "messages": "\\ud800"}', 400, None, ""),
    "deep nesting": (COMPLETIONS, b'{"prompt": ' + b"[" * 50_000, 400, None, ""),
    "20 MB": (COMPLETIONS, completion(prompt="a" * 20 * MIB), 413, None, "bytes"),
    "another model": (COMPLETIONS, completion(model="gpt-9"), 404, "model", "gpt-9"),
    "no prompt": (COMPLETIONS, b'{"model": "tiny"}', 400, "prompt", "missing"),
    "empty prompt": (COMPLETIONS, completion(prompt=""), 400, "prompt", "empty"),
    "empty list": (COMPLETIONS, completion(prompt=[]), 400, "prompt", "empty"),
    "an empty prompt of two": (COMPLETIONS, completion(prompt=["a", ""]), 400, "prompt", "empty"),
    "a number": (COMPLETIONS, completion(prompt=7), 400, "prompt", "list"),
    "mixed list": (COMPLETIONS, completion(prompt=[3, "a"]), 400, "prompt", "str"),
    "true as a token": (COMPLETIONS, completion(prompt=[True]), 400, "prompt", "bool"),
    "unknown token": (COMPLETIONS, completion(prompt=[VOCAB_SIZE]), 400, "prompt", "130"),
    "negative token": (COMPLETIONS, completion(prompt=[-1]), 400, "prompt", "-1"),
    "too long": (COMPLETIONS, completion(prompt="a" * 33_000), 400, "prompt", "33000"),
    "too long ids": (COMPLETIONS, completion(prompt=[5] * 33_000), 400, "prompt", "33000"),
    "no messages": (CHAT, b'{"model": "tiny"}', 400, "messages", "missing"),
    "a strange role": (CHAT, chat(messages=[{"role": "x", "content": "a"}]), 400, None, "role"),
    "max_tokens 0": (COMPLETIONS, completion(max_tokens=0), 400, "max_tokens", "at least 1"),
    "max_tokens -5": (COMPLETIONS, completion(max_tokens=-5), 400, "max_tokens", "-5"),
    "min_tokens huge": (COMPLETIONS, completion(min_tokens=10**18), 400, "min_tokens", "left"),
    "max_tokens text": (COMPLETIONS, completion(max_tokens="5"), 400, "max_tokens", ""),
    "max_tokens 1.5": (COMPLETIONS, completion(max_tokens=1.5), 400, "max_tokens", ""),
    "temperature -1": (COMPLETIONS, completion(temperature=-1), 400, "temperature", "0"),
    "top_p -1": (COMPLETIONS, completion(top_p=-1), 400, "top_p", "0"),
    "n 0": (COMPLETIONS, completion(n=0), 400, "n", "1 to"),
    "n 1000": (CHAT, chat(n=1000), 400, "n", "1000"),
    "logprobs 99": (COMPLETIONS, completion(logprobs=99), 400, "logprobs", "99"),
    "stop of numbers": (COMPLETIONS, completion(stop=[1]), 400, None, "stop"),
    "empty stop": (COMPLETIONS, completion(stop=""), 400, "stop", "empty"),
    "nothing to draw": (
        COMPLETIONS,
        completion(allowed_token_ids=[99], bad_words=["aa"], min_tokens=2),
        400,
        "allowed_token_ids",
        "no token to draw",
    ),
    "seed too large": (COMPLETIONS, completion(seed=2**70), 400, "seed", ""),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function", "missing"),
    "another path": ("/v1/embeddings", completion(), 404, None, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_words(tiny_api: Api, name: str) -> None:
    path, body, status, param, word = CASES[name]
    headers = {"content-type": "application/json"}
    reply = tiny_api.http.post(path, content=body, headers=headers)
    error = ApiError.read(reply.status_code, reply.json())
    assert (error.status, error.kind) == (status, "invalid_request_error"), error
    assert word in error.message
    if param is not None:
        assert error.param == param, error


def test_a_request_that_runs_out_of_tokens_ends_alone(tiny_api: Api) -> None:
    """Its rules leave a way, which the biased draw does not take: it ends with its own fault."""
    a, b = byte_tokens("ab")
    ruled: Fields = {"allowed_token_ids": [a, b], "bad_words": ["aa", "ab"], "max_tokens": 9}
    others: list[Fields] = [
        {"prompt": prompt_tokens(20 + i, salt=3), "max_tokens": 30, "ignore_eos": True, "seed": i}
        for i in range(4)
    ]
    wanted = [tiny_api.complete(**fields) for fields in others]
    stuck = {"prompt": prompt_tokens(9), "logit_bias": {str(a): 100}, **ruled}
    answers = tiny_api.complete_all([*others[:2], stuck, *others[2:]])
    failure = answers.pop(2)
    assert answers == wanted
    assert isinstance(failure, ApiFailure)
    assert (failure.error.status, failure.error.kind) == (400, "invalid_request_error")
    assert "no token is left to draw behind 1 tokens" in failure.error.message
    goes_on = {"prompt": prompt_tokens(9), "logit_bias": {str(b): 100}, **ruled}
    assert tiny_api.complete(**goes_on).text == "b" * 9


def test_a_wrong_method_is_refused(tiny_api: Api) -> None:
    reply = tiny_api.http.get(COMPLETIONS)
    assert ApiError.read(reply.status_code, reply.json()).status == 405


def send_garbage(port: int, data: bytes) -> None:
    """Say it, hear what comes, hang up; a peer that resets the connection is right too."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        except OSError:
            pass


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "noise": bytes(range(256)) * 400,
    "half an HTTP/2 greeting": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\xff\x04",
    "half a ZMTP greeting": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + bytes(48),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_a_node_s_ports_disturbs_nobody(
    tiny_cluster: Cluster, tiny_api: Api, name: str
) -> None:
    spec = tiny_cluster.spec
    ports = [int(flag(spec, "decode-1", key)) for key in ("--port", "--kv-port")]
    requests: list[Fields] = [
        {"prompt": prompt_tokens(300 + i, salt=51), "max_tokens": 100, "temperature": 0}
        for i in range(4)
    ]
    wanted = [tiny_api.complete(**request) for request in requests]
    with ThreadPoolExecutor(8) as strangers:
        noise = [
            strangers.submit(send_garbage, port, GARBAGE[name]) for port in ports for _ in range(4)
        ]
        assert tiny_api.complete_all(requests) == wanted
        for stranger in noise:
            stranger.result(timeout=60)
