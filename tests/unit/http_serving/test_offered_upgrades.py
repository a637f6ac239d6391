"""Requests that offer another protocol are answered in this one, in whatever segments they come."""

from __future__ import annotations

import pytest

from tests.support.http.echo import exchange

JDK = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAA\r\n"
WEBSOCKET = (
    b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\nSec-WebSocket-Version: 13\r\n"
)
OFFERS = {
    "h2c": JDK,
    "websocket": WEBSOCKET,
    "several": b"Connection: upgrade\r\nUpgrade: h2c, foo/1\r\nUPGRADE: TLS/1.0\r\n",
}
BODY = b'{"text": "hello"}'
REQUESTS = {
    "length": b"Content-Length: 17\r\n\r\n" + BODY,
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n7\r\n" + BODY[:7] + b"\r\na\r\n" + BODY[7:]
    + b"\r\n0\r\n\r\n",
}  # fmt: skip


@pytest.mark.covers("W01")
@pytest.mark.parametrize("rest", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offer_is_ignored_and_the_request_answered(offer: bytes, rest: bytes) -> None:
    request = b"POST /x?y=1 HTTP/1.1\r\nHost: a\r\n" + offer + rest
    at = len(request) - len(rest)
    for cut in (at, at + rest.index(b"\r\n\r\n") + 4, len(request) - 5, 40, None):
        segments = [request] if cut is None else [request[:cut], request[cut:]]
        (asked,) = await exchange(*segments)
        assert (asked["method"], asked["path"], asked["body"]) == ("POST", "/x", BODY.decode())
    (asked,) = await exchange(*(bytes([byte]) for byte in request))
    assert asked["body"] == BODY.decode()


async def test_what_follows_on_the_connection_is_read() -> None:
    """A client may go on offering, or stop; a GET has no body."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\n"
    first = head + JDK + REQUESTS["length"]
    second = b"GET /second HTTP/1.1\r\nHost: a\r\n" + WEBSOCKET + b"\r\n"
    third = head + REQUESTS["chunks"]
    for segments in ([first + second + third], [first, second, third]):
        asked = await exchange(*segments, num_answers=3)
        assert [one["body"] for one in asked] == [BODY.decode(), "", BODY.decode()]


@pytest.mark.covers("W01")
async def test_thousands_of_offers_in_one_segment() -> None:
    request = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert len(await exchange(request * 3000, num_answers=3000)) == 3000


async def test_other_headers_and_the_version_stay() -> None:
    request = b"POST / HTTP/1.0\r\nHost: a\r\nExpect: x\r\n" + JDK + REQUESTS["length"]
    (asked,) = await exchange(request)
    assert asked["version"] == "1.0"
    assert asked["headers"] == {
        "host": "a",
        "expect": "x",
        "connection": "Upgrade, HTTP2-Settings",
        "http2-settings": "AAEAAEAAAA",
        "content-length": "17",
    }


async def test_a_header_of_that_name_without_an_offer_is_a_header() -> None:
    (asked,) = await exchange(b"POST / HTTP/1.1\r\nUpgrade: h2c\r\n" + REQUESTS["length"])
    assert asked["body"] == BODY.decode()
