"""The page of a running cluster: its nodes, a request in flight, a router that goes and returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, Tab
from tests.support.cluster.api import Api, Fields
from tests.support.cluster.cluster import Cluster
from tests.support.models.tiny_model import prompt_tokens

STATE = "document.querySelector('#connection').dataset.state"


@pytest.fixture
def api(page_cluster: Cluster) -> Iterator[Api]:
    with Api(page_cluster.url, "tiny") as api:
        yield api
    page_cluster.check_settled()


def shows(text: str, selector: str = "body") -> str:
    return f"document.querySelector({selector!r})?.innerText.includes({text!r})"


def test_the_nodes_of_a_cluster(page_cluster: Cluster, tab: Tab) -> None:
    tab.goto(page_cluster.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert tab.text("#prefill-column h4") == "prefill-1"
    assert tab.text("#decode-column h4") == "decode-1"
    assert tab.text("h1 span") == "tiny"
    assert tab.text("#connection") == "live"
    num_blocks = page_cluster.status("decode-1").num_blocks
    assert tab.run(shows(f"{num_blocks} blocks:", "#decode-column .card"))
    seats = "document.querySelector('#decode-column .card').innerText.match(/(\\d+) of \\d+ seats/)"
    assert tab.run(f"{seats}[1]") == "0"
    assert tab.run("document.querySelectorAll('figure').length") == 8


def test_a_request_in_flight(page_cluster: Cluster, api: Api, tab: Tab) -> None:
    tab.goto(page_cluster.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    endless: Fields = {
        "prompt": prompt_tokens(64, salt=1),
        "max_tokens": 20_000,
        "ignore_eos": True,
    }
    with page_cluster.slow(), api.stream(**endless) as stream:
        stream.read_tokens(1)
        tab.wait("document.querySelectorAll('.dot[data-phase=decode]').length == 1")
        tab.wait(shows("1 decode", "#figures"))
        tab.wait(shows("1 of", "#decode-column .card"))
        tab.wait(shows("running", "#decode-column .card"))
        assert tab.run("document.title").startswith("1 running")
        inside = """(() => {
          const dot = document.querySelector('.dot[data-phase=decode]').getBoundingClientRect();
          const card = document.querySelector('#decode-column .card').getBoundingClientRect();
          return dot.left >= card.left && dot.right <= card.right
            && dot.top >= card.top && dot.bottom <= card.bottom;
        })()"""
        tab.wait(inside)
    tab.wait("document.querySelectorAll('.dot[data-phase=decode]').length == 0")
    row = "#placements tbody tr"
    tab.wait(f"document.querySelector('{row}')?.cells[4].innerText == 'abort'")
    cells = tab.run(f"[...document.querySelectorAll('{row}')[0].cells].map((c) => c.innerText)")
    assert cells[2:4] == ["prefill-1", "decode-1"]
    assert "best of 1" in cells[7]
    pair = "[...document.querySelectorAll('#pairs tbody td')].map((cell) => cell.innerText)"
    tab.wait(f"{pair}.length == 7 && {pair}[6] != '0 B'")
    assert tab.run(pair)[:4] in (
        ["prefill-1", "decode-1", transport, "connected"] for transport in ("shm", "zmq")
    )


def test_a_router_that_is_restarted(page_cluster: Cluster, browser: Browser) -> None:
    tab = browser.open_tab().resize(1240, 900)
    tab.goto(page_cluster.url)
    tab.wait(f"{STATE} == 'live'")
    router = page_cluster.processes["router-1"]
    router.kill()
    tab.wait(f"{STATE} == 'lost'")
    assert "does not answer; what you see is old" in tab.text("#connection")
    assert tab.run("document.body.classList.contains('is-stale')")
    page_cluster.mend()
    tab.wait(f"{STATE} == 'live'")
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert not tab.run("document.body.classList.contains('is-stale')")
    only_refused = {"net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING"}
    assert all(any(why in text for why in only_refused) for text in tab.complaints())


def test_a_router_that_falls_silent(page_cluster: Cluster, tab: Tab) -> None:
    tab.goto(page_cluster.url)
    tab.wait(f"{STATE} == 'live'")
    router = page_cluster.processes["router-1"]
    router.freeze()
    try:
        tab.wait(f"{STATE} == 'stale'")
        assert "what you see is old" in tab.text("#connection")
    finally:
        router.thaw()
    tab.wait(f"{STATE} == 'live'")
