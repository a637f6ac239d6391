"""The addresses of routers that commands are given."""

from __future__ import annotations

import pytest

from pdserve.commands.http_client import RouterUnreachable, fetch_json


@pytest.mark.parametrize("host", ["a..b", ".example", "a" * 64, "é..b", f"{'é' * 64}.example"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(RouterUnreachable) as refused:
        fetch_json(f"http://{host}:8000", "/v1/models")
    assert str(refused.value).startswith(f"http://{host}:8000: no host has this name: wanted ")


@pytest.mark.parametrize("url", ["", "http://", "ftp://a", "http://a:b", "http://a:99999", "a b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(RouterUnreachable, match="wanted http://host:port"):
        fetch_json(url, "/v1/models")
