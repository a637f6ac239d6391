"""A client with a key attacks a router, beside others, for whom nothing may stand still.

Paths that are written in other ways, bodies that do not come, answers that weigh as much as they
may, viewers that stay: each attack fails, and other clients are served meanwhile (`served_beside`).
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from router.access.api_keys import add_api_key, revoke_api_key
from router.access.arriving_bodies import MAX_BODIES, MAX_BYTES
from router.api.planning.choices import MAX_ANSWER_LOGPROBS
from router.live.feed import MAX_VIEWERS_PER_KEY
from tests.support.attacks.beside import served_beside
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import CHAT, COMPLETIONS, Api, Fields
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.memory import forget_peak, memory_of
from tests.support.grammars.hostile_grammars import LONG
from tests.support.http.other_paths import WAYS

MIB = 1 << 20
LARGE_BODY_BYTES = 256 << 10
LONGEST_ANSWER_S = 120.0
MOST_GROWTH_BYTES = 512 * MIB
"""Growth of the router at the worst moment: arriving bodies may be 256 MiB, some of them twice."""
LIMITED = (
    *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
)


@dataclass(frozen=True)
class Attacker:
    """A client's key that is no administrator's, and where the router listens."""

    key: str
    admin: str
    port: int
    url: str

    def head(self, method: str, target: str, length: int) -> bytes:
        return (
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Length: {length}\r\n\r\n"
        ).encode("latin-1")

    def status(self, path: str, body: Fields, key: str | None = None) -> int:
        headers = {"authorization": f"Bearer {key or self.key}"}
        answer = httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)
        return answer.status_code


@pytest.fixture
def attacker(keyed_cluster: Cluster, keys: Path) -> Iterator[Attacker]:
    file = keys / "router/api_keys.json"
    key = add_api_key(file, "hostile", max_concurrent=4)
    port = int(keyed_cluster.url.rpartition(":")[2])
    admin = (keys / "client/admin.key").read_text().strip()
    made = Attacker(key, admin, port, keyed_cluster.url)
    known = lambda: made.status("/tokenize", {"prompt": "Hi"}) == 200  # noqa: E731
    wait_until(known, "the router knows the attacker's key")
    yield made
    revoke_api_key(file, "hostile")


@pytest.fixture(autouse=True)
def served_others(keyed_cluster: Cluster) -> Iterator[None]:
    with served_beside(keyed_cluster):
        yield


@pytest.fixture(autouse=True)
def bounded_router(keyed_cluster: Cluster) -> Iterator[None]:
    """The router takes no more memory than it may, and is the same process afterwards."""
    (router,) = (p for p in keyed_cluster.processes.values() if p.name.startswith("router"))
    pid, before = router.pid, memory_of(router.pid)
    forget_peak(pid)
    yield
    router.require_running()
    growth = memory_of(pid, "VmHWM") - before
    print(f"the router grew by {growth / MIB:.0f} MiB")
    assert router.pid == pid
    assert growth < MOST_GROWTH_BYTES, f"the router grew by {growth / MIB:.0f} MiB"


def ask(attacker: Attacker, method: str, target: str, body: bytes) -> int:
    """The status of a request whose target goes out as it is; 0 where the connection is closed."""
    with socket.create_connection(("127.0.0.1", attacker.port), 30) as client:
        client.sendall(attacker.head(method, target, len(body)) + body)
        with client.makefile("rb") as answer:
            line = answer.readline()
    return int(line.split()[1]) if line else 0


def test_a_path_written_in_other_ways_drains_nothing(
    keyed_cluster: Cluster, attacker: Attacker
) -> None:
    body = b'{"node_id": "decode-1"}'

    statuses = {ask(attacker, "POST", way("/v1/cluster/drain"), body) for way in WAYS.values()}
    assert statuses <= {400, 403, 404, 405}
    for node in keyed_cluster.live_nodes():
        assert not node.load.is_draining, node


def test_a_path_written_in_other_ways_passes_no_limit(attacker: Attacker, keys: Path) -> None:
    file = keys / "router/api_keys.json"
    spent = Attacker(
        add_api_key(file, "spent", requests_per_minute=1),
        attacker.admin,
        attacker.port,
        attacker.url,
    )
    body: Fields = {"prompt": "Hi", "max_tokens": 1}

    wait_until(lambda: spent.status(COMPLETIONS, body) == 429, "the key is at its limit")
    statuses = {
        ask(spent, "POST", way(path), json.dumps(body).encode())
        for path in LIMITED
        for way in WAYS.values()
    }
    revoke_api_key(file, "spent")
    assert statuses <= {400, 404, 405, 429}


async def begin(attacker: Attacker, length: int, data: bytes, path: str) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", attacker.port)
    writer.write(attacker.head("POST", path, length) + data)
    await writer.drain()
    return writer


def test_bodies_of_one_byte_lock_nobody_out(keyed_api: Api, attacker: Attacker) -> None:
    """1,024 of them took every seat of a router."""
    short: Fields = {"prompt": "Hi", "max_tokens": 1}

    async def attack() -> None:
        slow = []
        for number in range(MAX_BODIES + 200):
            slow.append(await begin(attacker, 1000, b"{", LIMITED[number % len(LIMITED)]))
        for key in (attacker.admin, attacker.key, None):
            for path in (COMPLETIONS, "/tokenize"):
                asked = asyncio.to_thread(attacker.status, path, short, key)
                assert await asked == 200, path
        assert (await asyncio.to_thread(keyed_api.complete, "Hi", max_tokens=1)).tokens
        for writer in slow:
            writer.transport.abort()

    asyncio.run(attack())


def test_large_bodies_that_stop_short_are_not_all_held(attacker: Attacker) -> None:
    size = 9 * MIB
    data = b" " * (size - 1)

    async def attack() -> None:
        slow = []
        for _ in range(2 * MAX_BYTES // size):
            writer = await begin(attacker, size, b"", COMPLETIONS)
            for first in range(0, len(data), MIB):
                writer.write(data[first : first + MIB])
                await writer.drain()
            slow.append(writer)
        short: Fields = {"prompt": "Hi", "max_tokens": 1}
        assert await asyncio.to_thread(attacker.status, COMPLETIONS, short, attacker.admin) == 200
        for writer in slow:
            writer.transport.abort()

    asyncio.run(attack())


READ_ALL = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), float(sys.argv[2])) as client:
    client.sendall(sys.stdin.buffer.read())
    while part := client.recv(1 << 20):
        sys.stdout.buffer.write(part)
"""


def raw_answer(attacker: Attacker, path: str, fields: Fields) -> bytes:
    """Everything that a request is answered, read by a process of its own.

    A thread that reads as many events would hold up the one that measures.
    """
    body = json.dumps(fields).encode()
    head = attacker.head("POST", path, len(body)).replace(b"\r\n\r\n", b"\r\n")
    return subprocess.run(
        [sys.executable, "-S", "-c", READ_ALL, str(attacker.port), str(LONGEST_ANSWER_S)],
        input=head + b"Connection: close\r\n\r\n" + body,
        capture_output=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_heaviest_answers_that_are_allowed(attacker: Attacker, *, is_stream: bool) -> None:
    num_choices, num_top = 8, 20
    most = MAX_ANSWER_LOGPROBS // (num_choices * (1 + num_top))
    fields: Fields = {
        "messages": [{"role": "user", "content": "Hi"}],
        "n": num_choices,
        "max_tokens": most,
        "logprobs": True,
        "top_logprobs": num_top,
        "ignore_eos": True,
        "stream": is_stream,
    }

    refused = raw_answer(attacker, CHAT, fields | {"max_tokens": most + 1})
    # More would fill the pools of the nodes, or be more events than two cores can make.
    at_once = 1 if is_stream else 2
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(threads.map(lambda _: raw_answer(attacker, CHAT, fields), range(at_once)))
    assert refused.startswith(b"HTTP/1.1 400")
    assert f"wanted at most {MAX_ANSWER_LOGPROBS}".encode() in refused
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b'"top_logprobs"') == num_choices * most
        assert answer.count(b'"finish_reason":"length"') == num_choices


def test_the_heaviest_echo_that_is_allowed(attacker: Attacker) -> None:
    """Each token of a long prompt with the 20 likeliest ones, and of a longer one without."""

    for length, num_top in ((2000, 20), (4000, 0)):
        for is_stream in (False, True):
            fields: Fields = {
                "prompt": "x" * length,
                "echo": True,
                "logprobs": num_top,
                "max_tokens": 0,
                "stream": is_stream,
            }
            assert raw_answer(attacker, COMPLETIONS, fields).startswith(b"HTTP/1.1 200")


def test_viewers_of_one_key_leave_places_to_others(attacker: Attacker) -> None:
    def watch(key: str, open_streams: ExitStack) -> int:
        headers = {"authorization": f"Bearer {key}"}
        stream = open_streams.enter_context(
            httpx.stream("GET", f"{attacker.url}/v1/live", headers=headers, timeout=60)
        )
        return stream.status_code

    with ExitStack() as open_streams:
        statuses = [watch(attacker.key, open_streams) for _ in range(40)]
        assert statuses == [200] * MAX_VIEWERS_PER_KEY + [503] * (40 - MAX_VIEWERS_PER_KEY)
        assert watch(attacker.admin, open_streams) == 200


@pytest.mark.covers("G13")
def test_grammars_of_one_client_keep_no_other_waiting(
    keyed_api: Api, attacker: Attacker, keys: Path
) -> None:
    """A dozen that compile until a limit stops them, beside new schemas of another client."""
    (name, *_) = LONG
    file = keys / "router/api_keys.json"
    many = replace(attacker, key=add_api_key(file, "many"))
    short: Fields = {"prompt": "Hi"}
    wait_until(lambda: many.status("/tokenize", short) == 200, "the router knows the key")

    def begin_long(number: int) -> socket.socket:
        schema = json.loads(LONG[name].text) | {"title": f"another {number}"}
        body = json.dumps({"model": "tiny", "prompt": "Hi", "guided_json": schema}).encode()
        client = socket.create_connection(("127.0.0.1", many.port), 30)
        client.sendall(many.head("POST", COMPLETIONS, len(body)) + body)
        return client

    with ExitStack() as open_sockets:
        hostile = [open_sockets.enter_context(begin_long(number)) for number in range(12)]
        for number in range(10):
            key = f"p{number}"
            schema = {"type": "object", "properties": {key: {}}, "required": [key]}
            keyed_api.complete("Hi", max_tokens=1, guided_json=schema)
            keyed_api.complete("Hi", max_tokens=1, metadata="x" * LARGE_BODY_BYTES)
        are_answered, _, _ = select.select(hostile, [], [], 0)
        assert len(are_answered) < len(hostile) / 2, "others waited for them"
    revoke_api_key(file, "many")
