"""Whole requests as bytes: their heads, their framing, and how the client ends.

A case follows from a seed and a number alone, so it can be sent again. Files hold the bytes, which
stay what they are when the fuzzer changes.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from tests.fuzz_http.bodies import POSTED, any_body, valid_fields
from tests.fuzz_http.values import any_text, as_json
from tests.support.http.other_paths import WAYS

READ = (
    *("/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs", "/docs/app.js"),
    *("/v1/models", "/v1/models/tiny", "/v1/models/a%2Fb", "/v1/cluster", "/v1/cluster/targets"),
    *("/v1/cluster/placements", "/v1/live", "/nothing", "/v1/embeddings", "/v1/responses/r1"),
)
ENDLESS = "/v1/live"
"""Its answer goes on until the client leaves."""
_METHODS = (
    *("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PRI"),
    *("get", "G", "X" * 100, "GET\x00", "", "PO ST", "M-SEARCH", "PROPFIND"),
)
_TARGETS = (
    *("*", "http://localhost/health", "//", "/%", "/\x00", "/a b", "/é", "", "/" + "a" * 70_000),
    *("/v1/models/" + "%20" * 3000, "/?" + "a=1&" * 9000, "?", "/v1/completions?stream=true", "x:"),
    *("/v1/models/..%2f..%2fetc", "/docs/..%2fapp.py", "/docs/%2e%2e", "/docs/%00", "/health#a"),
)
_HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Content-Type", ("text/plain", "application/json; charset=utf-16", "", "multipart/form-data")),
    ("Content-Encoding", ("gzip", "identity", "br", "deflate, gzip", "")),
    ("Accept", ("text/event-stream", "text/html", "*/*;q=0", "\xff", "a" * 9000)),
    ("Accept-Encoding", ("gzip", "br;q=1.0, *;q=0", "identity;q=0")),
    ("Authorization", ("Bearer x", "Basic ////", "Bearer", "Bearer \xe9", "x" * 5000)),
    ("X-Api-Key", ("", "a", "\xff\xfe")),
    ("X-Request-Id", ("a", "", "a" * 129, "\xe9", "a\tb", "{}", "%0a")),
    ("Origin", ("null", "http://localhost", "http://example.org", "http://[::1", "x")),
    ("Host", ("localhost:99999", "example.org", "[::1]", "", "a b", "localhost, a")),
    ("Cookie", ("a=b; " * 1000, "=;;")),
    ("Range", ("bytes=0-", "bytes=-1", "x")),
    ("If-None-Match", ("*", '"x"')),
    ("If-Modified-Since", ("Thu, 01 Jan 1970 00:00:00 GMT", "x")),
    (
        "Traceparent",
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-0-0-00", "x", "é".encode().hex()),
    ),
    ("Tracestate", ("a=b", "=" * 600)),
    ("Forwarded", ("for=1.2.3.4",)),
    ("X-Forwarded-For", ("1.2.3.4", "x" * 999)),
    ("X-Forwarded-Proto", ("https", "x")),
    ("Connection", ("close", "keep-alive", "Content-Length", "Upgrade")),
    ("Upgrade", ("h2c", "websocket", "HTTP/2.0")),
    ("Expect", ("100-continue", "x")),
    ("Access-Control-Request-Method", ("POST", "")),
    ("X-HTTP-Method-Override", ("DELETE",)),
    ("A" * 3000, ("b",)),
)
_BROKEN_LINES = (
    *("Content-Length: -1", "Content-Length: +5", "Content-Length: 5, 6", "Content-Length: 1e3"),
    *("Content-Length: " + "9" * 25, "Content-Length:", "Content-Length: 5\r\nContent-Length: 6"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: x"),
    *(
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "a",
        ":",
        ": a",
    ),
    *("a b: c", "a: b\x00c", "a: b\rc", " folded: a", "a: b\n c", "Host: a\r\nHost: b", "\x00: a"),
)
_VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.2", "http/1.1", "HTTP/1.", "", "HTTPS/1.1")


class Ending(Enum):
    """What the client does once its bytes are sent."""

    READ = "read"
    HALF_CLOSE = "half_close"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes on one connection, in parts with a short pause between two.

    `methods` are those of the requests that must be answered, one answer each. Where there are
    none, the bytes may be no request at all: any number of answers is right.
    """

    number: int
    kind: str
    parts: tuple[bytes, ...]
    methods: tuple[str, ...]
    ending: Ending

    @property
    def first_method(self) -> str:
        """Return the method of the first request as far as it matters for reading an answer."""
        return "HEAD" if self.parts[0].lstrip(b"\r\n").startswith(b"HEAD ") else "GET"

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        parts = [base64.b64encode(part).decode() for part in self.parts]
        begins = [part[:2000].decode("latin-1") for part in self.parts[:2]]
        own = {"number": self.number, "kind": self.kind, "methods": list(self.methods)}
        return own | {"ending": self.ending.value, "parts_base64": parts, "begins": begins}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the case of `as_json`."""
        parts = tuple(base64.b64decode(part) for part in value["parts_base64"])
        methods, ending = tuple(value["methods"]), Ending(value["ending"])
        return cls(value["number"], value["kind"], parts, methods, ending)


def write_cases(file: Path, seed: int, why: str, cases: Sequence[Case]) -> None:
    """Keep cases for `--replay`."""
    value = {"seed": seed, "why": why, "cases": [case.as_json() for case in cases]}
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_cases(file: Path) -> list[Case]:
    """Return the cases of `write_cases`."""
    return [Case.from_json(one) for one in json.loads(file.read_text("utf-8"))["cases"]]


def make_case(seed: int, number: int) -> Case:
    """Return the case with this number; the same seed gives the same cases."""
    rng = random.Random(f"{seed} {number}")
    where = rng.random()
    if where < 0.6:
        return _posted(rng, number)
    if where < 0.7:
        return _routed(rng, number)
    if where < 0.8:
        return _with_headers(rng, number)
    if where < 0.85:
        return _pipelined(rng, number)
    if where < 0.9:
        return _chunked(rng, number)
    if where < 0.96:
        return _broken_head(rng, number)
    return _left(rng, number)


def _request(method: str, target: str, body: bytes, lines: Sequence[str] = ()) -> bytes:
    """Return a request whose framing is right."""
    own = [f"{method} {target} HTTP/1.1", "Host: localhost", *lines]
    if body or method == "POST":
        own += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return _joined(own) + body


def _joined(lines: Sequence[str]) -> bytes:
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass")


def _posted(rng: random.Random, number: int) -> Case:
    path = rng.choice((*POSTED, *POSTED[:4], *POSTED[:2], *POSTED[:2]))
    data = _request("POST", path, any_body(rng, path))
    parts: tuple[bytes, ...] = (data,)
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        parts = (data[:at], data[at:])
    return Case(number, f"body {path}", parts, ("POST",), Ending.READ)


def _routed(rng: random.Random, number: int) -> Case:
    where = rng.random()
    path = rng.choice((*READ, *POSTED))
    if where < 0.4:
        method = rng.choice(_METHODS[:8])
        data = _request(method, path, b"{}" if method in ("POST", "PUT") else b"")
        is_endless = (method, path) == ("GET", ENDLESS)
        methods = () if is_endless else (method,)
        return Case(number, f"route {path}", (data,), methods, Ending.READ)
    target = WAYS[rng.choice(sorted(WAYS))](path) if where < 0.7 else rng.choice(_TARGETS)
    method = rng.choice(_METHODS[:2] if rng.random() < 0.6 else _METHODS)
    return Case(number, "target", (_request(method, target, b""),), (), Ending.READ)


def _with_headers(rng: random.Random, number: int) -> Case:
    lines = []
    for name, values in rng.sample(_HEADERS, rng.choice((1, 2, 5))):
        lines.append(f"{name}: {rng.choice(values)}")
    if rng.random() < 0.1:
        text = any_text(rng).replace("\r", "").replace("\n", "")
        lines.append(f"X-Any: {text}")
    if rng.random() < 0.1:
        lines += [f"X-{i}: a" for i in range(rng.choice((50, 98, 99, 100, 101, 5000)))]
    path = rng.choice((*READ, *POSTED))
    body = any_body(rng, path) if path in POSTED else b""
    data = _request("POST" if path in POSTED else "GET", path, body, lines)
    return Case(number, f"headers {path}", (data,), (), Ending.READ)


def _pipelined(rng: random.Random, number: int) -> Case:
    """Several requests in one write: each is answered, in their order."""
    data, methods = list[bytes](), list[str]()
    for _ in range(rng.choice((2, 3, 8, 40))):
        if rng.random() < 0.5:
            method, path, body = rng.choice(("GET", "HEAD")), rng.choice(READ[:12]), b""
        else:
            method, path = "POST", rng.choice(POSTED[:6])
            body = as_json(rng, valid_fields(rng, path) if len(data) < 3 else {})
        methods.append(method)
        data.append(_request(method, path, body))
    whole = b"".join(data)
    ending = rng.choice((Ending.READ, Ending.READ, Ending.LEAVE))
    known = tuple(methods) if ending is Ending.READ else ()
    return Case(number, "pipelined", (whole,), known, ending)


def _chunked(rng: random.Random, number: int) -> Case:
    path = rng.choice(POSTED)
    body = any_body(rng, path)
    size = rng.choice((1, 7, 1000, 100_000)) if len(body) < 2000 else 100_000
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    heads = [f"{len(chunk):x}".encode() for chunk in chunks] + [b"0"]
    is_broken = rng.random() < 0.6
    if is_broken:
        wrong = (
            b"",
            b"-1",
            b"g",
            b"ffffffffffffffffffff",
            b"1;" + b"a" * 70_000,
            b"0x5",
            b" 5",
            b"5 ",
        )
        heads[rng.randrange(len(heads))] = rng.choice((*wrong, b"10", b"0", b"00000000000005"))
    end = rng.choice((b"\r\n", b"\n")) if is_broken and rng.random() < 0.2 else b"\r\n"
    framed = b"".join(
        head + end + chunk + end for head, chunk in zip(heads, [*chunks, b""], strict=True)
    )
    if is_broken and rng.random() < 0.3:
        framed = framed[:-2] + rng.choice((b"X: a\r\n\r\n", b"X: " + b"a" * 70_000, b"a", b""))
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked"]
    ending = rng.choice((Ending.READ, Ending.HALF_CLOSE)) if is_broken else Ending.READ
    methods = () if is_broken else ("POST",)
    return Case(number, f"chunked {path}", (_joined(lines), framed), methods, ending)


def _broken_head(rng: random.Random, number: int) -> Case:
    path = rng.choice((*READ, *POSTED))
    method = rng.choice(_METHODS)
    version = rng.choice(_VERSIONS) if rng.random() < 0.4 else "HTTP/1.1"
    lines = [f"{method} {path} {version}", "Host: localhost", rng.choice(_BROKEN_LINES)]
    if rng.random() < 0.2:
        lines = lines[: rng.randrange(3)]
    data = _joined(lines) + rng.choice((b"", b"{}", b"hello" * 20))
    if rng.random() < 0.3:
        data = data.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\r\r\n", b"\n\r")))
    if rng.random() < 0.15:
        data = rng.randbytes(rng.choice((1, 50, 5000)))
    return Case(number, "broken head", (data,), (), rng.choice(tuple(Ending)))


def _left(rng: random.Random, number: int) -> Case:
    """A request that its client gives up: in its head, its body or its answer."""
    path = rng.choice(POSTED[:4])
    data = _request("POST", path, as_json(rng, valid_fields(rng, path)))
    if rng.random() < 0.5:
        data = data[: rng.randrange(len(data))]
    return Case(number, "left", (data,), (), rng.choice((Ending.HALF_CLOSE, Ending.LEAVE)))
