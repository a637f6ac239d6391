"""Reading on after a head that offers to change the protocol, which no port here accepts.

A server may ignore `Upgrade` and answer the request as it is (RFC 9110, section 7.8). The parser
cannot: at the end of such a head it stops, without the body, since what follows could be another
protocol. So the head is parsed again without the offer, and what follows it as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from httptools import HttpParserUpgrade, HttpRequestParser

if TYPE_CHECKING:
    from array import array

    Data = bytes | bytearray | memoryview[int] | array[int]


class Connection(Protocol):
    """What of a connection its parser needs; the parser also calls its `on_…` methods."""

    parser: HttpRequestParser
    url: bytes
    headers: list[tuple[bytes, bytes]]


def offers_upgrade(parser: HttpRequestParser) -> bool:
    """Return whether the head that was just parsed offers another protocol.

    The parser takes every CONNECT for an upgrade; what follows that is no HTTP.
    """
    return parser.should_upgrade() and parser.get_method() != b"CONNECT"


class OfferIgnoringParser(HttpRequestParser):
    """Parses requests as if none had an `Upgrade` header.

    A head with an offer is announced twice. At the first time `offers_upgrade` is true in
    `on_headers_complete` and `on_message_complete`, which must do nothing then.
    """

    def __init__(self, connection: Connection) -> None:
        """Parse for `connection`, whose parser is replaced after each offer."""
        super().__init__(connection)
        self._connection = connection
        # As uvicorn: after a request that closes the connection more may follow, and is ignored.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Data) -> None:
        """Parse `data`.

        Raises what the parser raises, but `HttpParserUpgrade` only after a CONNECT.
        """
        parser = self
        while True:
            try:
                HttpRequestParser.feed_data(parser, data)
            except HttpParserUpgrade as upgrade:
                if not offers_upgrade(parser):
                    raise
                # A view: a segment may hold thousands of small requests; none copies the rest.
                data = memoryview(data)[upgrade.args[0] :]
                parser = parser._successor()
            else:
                return

    def _successor(self) -> OfferIgnoringParser:
        """Return the connection's next parser, which has read the head without its offer."""
        connection = self._connection
        version = self.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.get_method(), connection.url, version)]
        lines += [b"%b: %b" % field for field in connection.headers if field[0] != b"upgrade"]
        connection.parser = parser = OfferIgnoringParser(connection)
        parser.feed_data(b"\r\n".join([*lines, b"", b""]))
        return parser
