"""The page over clusters that are made up: phases, hostile names, keys, both colour schemes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from common.ids import AttemptId, Incarnation
from common.nodes import KVLink, Role
from common.version import VERSION
from router.live.history import RATE_INTERVALS
from router.live.reading import LiveRequest, Phase, Reading
from router.watch.recent_placements import RecentPlacements
from tests.page.served_edge import ServedEdge, served_edge
from tests.support.browser import Tab
from tests.support.clocks.waiting import wait_until
from tests.support.observing.live_readings import node, placed, reading

P1, D1 = Incarnation("p1", 1), Incarnation("d1", 1)
P1_LINKS = (KVLink("d1", "shm", True, 1000),)
PAIR = reading(
    node(P1, Role.PREFILL, kv_links=P1_LINKS),
    node(D1, Role.DECODE, free_blocks=70, num_cached_blocks=20, num_receiving_blocks=10),
)
HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.fixture
def edge() -> Iterator[ServedEdge]:
    with served_edge() as edge:
        yield edge


@pytest.fixture
def locked_edge() -> Iterator[ServedEdge]:
    with served_edge(api_key="right") as edge:
        yield edge


def at(phase: Phase) -> Reading:
    prefill = P1 if phase in (Phase.PREFILL, Phase.TRANSFER) else None
    return replace(PAIR, requests=(LiveRequest("req-1", phase, D1, prefill),))


def test_nothing_runs_yet(edge: ServedEdge, tab: Tab) -> None:
    edge.show(reading(trouble="no decode or mixed node is heard"))
    tab.goto(edge.url)
    tab.wait(
        "!document.querySelector('main').hidden && !document.querySelector('#no-nodes').hidden"
    )
    assert "pdserve serve --role prefill" in tab.text("#no-nodes")
    assert "Requests have nowhere to run: no decode or mixed node is heard." in tab.text("#notices")
    assert f"curl {edge.url}/v1/chat/completions" in tab.text("#no-placements")
    assert "No KV has moved" in tab.text("#no-pairs")
    assert tab.run("document.querySelector('#placements').parentElement.hidden")


def test_a_request_moves_from_prefill_to_decode(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    settled = "document.querySelector('.dot')?.getAnimations().length === 0"
    where = "document.querySelector('.dot').getBoundingClientRect().left"
    lefts = []
    for phase in (Phase.PREFILL, Phase.TRANSFER, Phase.DECODE):
        edge.show(at(phase))
        tab.wait(f"document.querySelector('.dot[data-phase={phase.value}]') && {settled}")
        lefts.append(tab.run(where))
    assert lefts == sorted(lefts)
    card = "document.querySelector('#{}-column .card').getBoundingClientRect()"
    assert tab.run(f"{card.format('prefill')}.left") < lefts[0]
    assert lefts[0] < tab.run(f"{card.format('prefill')}.right") < lefts[2]
    assert tab.run(f"{card.format('decode')}.left") < lefts[2]
    edge.show(PAIR)
    tab.wait("document.querySelectorAll('.dot').length == 0")


def test_a_request_too_quick_for_a_snapshot_still_crosses(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    tab.run(
        "window.seen = 0; new MutationObserver((all) => {"
        "  for (const change of all) window.seen += change.addedNodes.length;"
        "}).observe(document.querySelector('#dots'), {childList: true})"
    )
    recent = RecentPlacements()
    placed(recent, "req-9", D1, P1)
    edge.show(replace(PAIR, placements=recent))
    tab.wait("window.seen == 1")
    tab.wait("document.querySelector('#placements tbody').innerText.includes('least loaded')")


def test_blocks_as_a_bar(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    bar = "document.querySelector('#decode-column .blocks')"
    label = "100 blocks: 20 running, 10 receiving, 20 cached, 50 free"
    assert tab.run(f"{bar}.getAttribute('aria-label')") == label
    widths = tab.run(f"[...{bar}.children].map((part) => parseFloat(part.style.width))")
    assert widths == [20, 0, 10, 0, 20, 50]


def test_a_tier_below_the_pool_has_a_bar_of_its_own(edge: ServedEdge, tab: Tab) -> None:
    keeping = node(P1, Role.PREFILL, num_host_blocks=400, num_prefix_host_blocks=100)
    edge.show(reading(keeping, PAIR.nodes[1]))
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    bar = "document.querySelector('#prefill-column .tiers .blocks')"
    text = "100 of 400 blocks in host memory hold prefixes"
    assert tab.run(f"{bar}.getAttribute('aria-label')") == text
    assert tab.run(f"{bar}.firstChild.style.width") == "25%"
    assert tab.text("#prefill-column .tiers") == text
    assert tab.run("document.querySelectorAll('#decode-column .tiers > *').length") == 0
    edge.show(PAIR)
    tab.wait("document.querySelectorAll('.tiers > *').length == 0")


def test_an_arrow_shows_what_was_pulled_lately(edge: ServedEdge, tab: Tab) -> None:
    """A pull is KV that a decode node sends, or a prefill node gets; it fades with its bytes."""

    def sent(num_bytes: int) -> Reading:
        links = (KVLink("p1", "zmq", True, num_bytes), KVLink("p2", "zmq", True, 2 * num_bytes))
        return reading(
            node(P1, Role.PREFILL, kv_links=(*P1_LINKS, KVLink("p2", "zmq", True, num_bytes))),
            node(Incarnation("p2", 1), Role.PREFILL),
            node(D1, Role.DECODE, kv_links=links),
        )

    edge.show(sent(1000))
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 3")
    arrows = "document.querySelectorAll('#links .pull')"
    assert tab.run(f"{arrows}.length") == 0
    assert tab.run("document.querySelectorAll('#links .idle').length") == 1
    rising = count(500_000, 500_000)

    def is_drawn() -> bool:
        edge.show(sent(next(rising)))
        return bool(tab.run(f"{arrows}.length == 3"))

    wait_until(is_drawn, "the arrows are drawn")
    heads = f"[...{arrows}].map((one) => one.getAttribute('d').split('M').length - 2)"
    assert tab.run(heads) == [1, 1, 1]
    last = sent(next(rising))
    for _ in range(RATE_INTERVALS + 1):
        edge.show(last)
    tab.wait(f"{arrows}.length == 0")


def test_the_legend_has_the_colours_of_the_bars(edge: ServedEdge, tab: Tab) -> None:
    """A running block of a prefill node has another colour than one of a decode node."""
    of_prefill = node(P1, Role.PREFILL, free_blocks=70, num_receiving_blocks=10)
    edge.show(reading(of_prefill, PAIR.nodes[1]))
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    legend = "[...document.querySelectorAll('#legend li')]"
    assert tab.run(f"{legend}.map((item) => item.innerText)") == [
        "running (on prefill nodes orange)",
        *("reserved", "receiving", "quarantined", "cached", "free"),
    ]
    ground = "((element, part) => getComputedStyle(element, part).backgroundColor)"
    shown = tab.run(
        f"Object.fromEntries({legend}.slice(1).map((item) => [item.className,"
        f" {ground}(item, '::before')]))"
    )
    both = tab.run(
        "getComputedStyle(document.querySelector('#legend .both'), '::before').backgroundImage"
    )
    running = []
    for column in ("prefill", "decode"):
        bar = f"#{column}-column .blocks"
        colours = tab.run(
            f"Object.fromEntries([...document.querySelectorAll('{bar} i')].map((part) =>"
            f" [part.className, {ground}(part)]))"
        )
        running.append(colours.pop("running"))
        assert colours == shown, column
        assert running[-1] in both, column
    assert running[0] != running[1]


def test_the_foot_says_version_router_and_how_long_it_runs(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelector('#router').innerText != ''")
    told = tab.text("#router")
    assert re.match(rf"pdserve {re.escape(VERSION)}, router r0, running for \d+ s\. ", told)
    spans = [0, 89.4, 90, 5399, 5400, 172_799, 172_800]
    assert tab.run(f"{spans}.map(shownDuration)") == [
        *("0 s", "89 s", "2 min", "90 min", "2 h", "48 h", "2 days"),
    ]
    links = "[...document.querySelectorAll('#open-links a')].map((a) => a.getAttribute('href'))"
    assert tab.run(links) == ["/docs", "/v1/cluster", "/metrics"]


def test_a_node_that_drains_or_is_suspected_has_a_badge(edge: ServedEdge, tab: Tab) -> None:
    leaving, silent = node(P1, Role.PREFILL, is_draining=True), node(D1, Role.DECODE)
    edge.show(reading(leaving, replace(silent, is_suspected=True)))
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert tab.text("#prefill-column .badges") == "draining"
    assert tab.text("#decode-column .badges") == "suspected"
    edge.show(reading(leaving, silent))
    tab.wait("document.querySelector('#decode-column .badges').innerText == ''")


def test_a_node_on_a_gpu_names_it(edge: ServedEdge, tab: Tab) -> None:
    on_card = node(P1, Role.PREFILL)
    on_card = replace(on_card, record=replace(on_card.record, device="A card, GPU 1"))
    edge.show(reading(on_card, node(D1, Role.DECODE)))
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert tab.text("#prefill-column .quiet") == "A card, GPU 1"
    assert tab.text("#decode-column .quiet") == ""


def test_names_from_the_cluster_are_text(edge: ServedEdge, tab: Tab) -> None:
    evil = Incarnation(HOSTILE, 1)
    recent = RecentPlacements()
    entry = placed(recent, HOSTILE, evil, evil, request_id="", reason=HOSTILE)
    recent.end(entry, HOSTILE, duration_s=1.0)
    edge.fail(status=502, code=HOSTILE, text=HOSTILE, request_id=HOSTILE, endpoint=HOSTILE)
    edge.show(
        reading(
            node(evil, Role.PREFILL, kv_links=(KVLink(HOSTILE, HOSTILE, True, 0),)),
            node(evil, Role.DECODE),
            model=HOSTILE,
            router_id=HOSTILE,
            trouble=HOSTILE,
            warnings=(HOSTILE,),
            requests=(LiveRequest(HOSTILE, Phase.DECODE, evil, evil),),
            placements=recent,
        )
    )
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    for selector in ("h1 span", ".card h4", "#notices", "#router", "#pairs", ".reason", "#errors"):
        assert HOSTILE in tab.text(selector)
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert tab.run("window.hacked") is None


def test_the_policy_refuses_what_was_not_sent_along(edge: ServedEdge, tab: Tab) -> None:
    tab.goto(edge.url)
    tab.wait("!document.querySelector('main').hidden")
    for markup in ("<img src=x onerror=window.hacked=1>", "<svg onload=window.hacked=1>"):
        tab.run(f"document.querySelector('#notices').innerHTML = {markup!r}")
    tab.run("document.head.append(Object.assign(document.createElement('script'),"
            " {textContent: 'window.hacked = 1'}))")  # fmt: skip
    assert tab.run("window.hacked") is None
    assert any("Content Security Policy" in text for text in tab.complaints())
    tab.forget_complaints()


def test_the_page_asks_for_the_key(locked_edge: ServedEdge, tab: Tab) -> None:
    locked_edge.show(PAIR)
    tab.goto(locked_edge.url)
    tab.wait("!document.querySelector('#key').hidden")
    assert tab.run("document.activeElement.id") == "key-input"
    assert tab.text("#key-error") == ""
    tab.type("wrong")
    tab.press_enter()
    tab.wait("document.querySelector('#key-error').innerText == 'That key was refused.'")
    assert tab.run("sessionStorage.length") == 0
    tab.type("right")
    tab.press_enter()
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert tab.run("document.querySelector('#key').hidden")
    assert tab.run("Object.values(sessionStorage).join() + localStorage.length") == "right0"
    tab.goto(locked_edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert tab.run("document.querySelector('#key').hidden")
    # The browser tells of each 401 as of an error.
    assert all("401" in text for text in tab.complaints())
    tab.forget_complaints()


@pytest.mark.parametrize("width", [1240, 700, 360])
def test_no_width_needs_scrolling_sideways(edge: ServedEdge, tab: Tab, width: int) -> None:
    long = Incarnation("decode-" + "very-long-name-" * 7, 1)
    edge.show(replace(PAIR, nodes=(*PAIR.nodes, node(long, Role.DECODE)), warnings=("w" * 200,)))
    tab.resize(width, 800)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 3")
    assert tab.run("document.documentElement.scrollWidth") <= width


CONTRAST = """(selector) => {
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const text = document.querySelector(selector);
  let ground = text;
  const isClear = (one) => getComputedStyle(one).backgroundColor === 'rgba(0, 0, 0, 0)';
  while (isClear(ground)) ground = ground.parentElement;
  const two = [luminance(getComputedStyle(text).color),
               luminance(getComputedStyle(ground).backgroundColor)].sort((a, b) => b - a);
  return [(two[0] + 0.05) / (two[1] + 0.05), luminance(getComputedStyle(ground).backgroundColor)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(edge: ServedEdge, tab: Tab, scheme: str) -> None:
    edge.show(replace(PAIR, warnings=("something is wrong",)))
    tab.prefer(scheme)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    for selector in ("h1", ".told", "#figures dt", "#notices li", "th", ".empty", "footer p"):
        contrast, ground = tab.run(f"({CONTRAST})({selector!r})")
        assert contrast >= 4.5, selector
        assert (ground > 0.5) == (scheme == "light"), selector


def test_what_a_screen_reader_finds(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    assert tab.run("document.documentElement.lang") == "en"
    unlabelled = (
        "[...document.querySelectorAll('[role=img], section, [role=region]')].filter((e) =>"
    )
    unlabelled += " !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')).length"
    assert tab.run(unlabelled) == 0
    assert tab.run("document.querySelectorAll('th:not([scope])').length") == 0
    assert tab.run("document.querySelector('#connection').getAttribute('role')") == "status"
    levels = tab.run("[...document.querySelectorAll('h1,h2,h3,h4')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1


def test_what_is_drawn_of_a_quarter_of_an_hour(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    drawn = tab.run(
        "(() => { const chart = new LineChart(CHARTS[0]);"
        " const sample = (t, v) => ({ at_s: t, ttft_p50_s: v, ttft_p99_s: null });"
        " const samples = [sample(0, 0.1), sample(1, 0.2), sample(2, null), sample(3, 0.1),"
        "             sample(30, 0.1), sample(60, 0.05)];"
        " chart.draw(samples, 900);"
        " return [chart.paths[0].getAttribute('d'), chart.paths[1].getAttribute('d'),"
        "         chart.top.textContent, chart.begin.textContent]; })()"
    )
    # Two seconds without requests and two gaps in the samples: four strokes.
    assert drawn[0].count("M") == 4
    assert drawn[0].startswith("M0.0 36.0h0L5.0 0.0M15.0 36.0h0")
    assert drawn[1:] == ["", "200 ms", "60 s ago"]


def test_a_placement_is_found_by_its_request_with_its_outcome(edge: ServedEdge, tab: Tab) -> None:
    recent = RecentPlacements()
    lost = placed(recent, "req-1", D1, P1)
    placed(recent, "req-1", D1, attempt=AttemptId("req-1", 2))
    for number in range(40):
        placed(recent, f"other-{number}", D1)
    edge.show(replace(PAIR, placements=recent))
    tab.goto(edge.url)
    rows = "[...document.querySelectorAll('#placements tbody tr')]"
    cells = f"{rows}.map((row) => [...row.cells].slice(1, 7).map((cell) => cell.innerText))"
    tab.wait(f"{rows}.length == 32")
    look = "document.querySelector('#wanted-request')"
    tab.run(f"{look}.value = 'http-req-1'; {look}.dispatchEvent(new Event('input'))")
    assert tab.run(cells) == [
        ["http-req-1 attempt 2", "–", "d1", "in progress", "–", "–"],
        ["http-req-1", "p1", "d1", "in progress", "–", "–"],
    ]
    recent.end(lost, "stop", num_tokens=12, duration_s=2.5)
    edge.show(replace(PAIR, placements=recent))
    tab.wait(f"{cells}[1][3] == 'stop'")
    assert tab.run(cells)[1] == ["http-req-1", "p1", "d1", "stop", "12", "2.50 s"]
    tab.run(f"{look}.value = 'nobody'; {look}.dispatchEvent(new Event('input'))")
    tab.wait("!document.querySelector('#no-match').hidden")
    assert tab.run("document.querySelector('#no-placements').hidden")


def test_refused_and_failed_requests_are_told_apart(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("!document.querySelector('#no-errors').hidden")
    edge.fail(status=400, code="invalid_request", text="top_p is 3", request_id="a")
    edge.fail(status=502, code="node_lost", text="d1 has left", request_id="b")
    edge.show(PAIR)
    rows = "[...document.querySelectorAll('#errors tbody tr')]"
    tab.wait(f"{rows}.length == 2")
    cells = f"{rows}.map((row) => [...row.cells].slice(1).map((cell) => cell.innerText))"
    assert tab.run(cells) == [
        ["502", "node_lost", "b", "completions", "d1 has left"],
        ["400", "invalid_request", "a", "completions", "top_p is 3"],
    ]
    assert tab.run(f"{rows}.map((row) => row.className)") == ["is-failure", ""]
    told = tab.text("#figures")
    assert "failed (5xx)" in told
    assert "refused (4xx)" in told


def test_the_period_of_the_charts_is_chosen(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    tab.run(
        "page.samples = page.samples.concat(Array.from({length: 400}, (_, n) =>"
        " ({...page.samples.at(-1), at_s: page.samples.at(-1).at_s + n + 1})))"
    )
    begins = []
    for period in ("60", "300", "900"):
        choice = "document.querySelector('#period')"
        tab.run(f"{choice}.value = '{period}'; {choice}.dispatchEvent(new Event('change'))")
        begins.append(tab.text(".axis .begin"))
    assert begins == ["60 s ago", "5 min ago", "7 min ago"]


def test_pointing_at_a_chart_marks_the_moment_in_all(edge: ServedEdge, tab: Tab) -> None:
    edge.show(PAIR)
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('.card').length == 2")
    tab.run(
        "(() => { const plot = document.querySelectorAll('.plot')[2];"
        " const box = plot.getBoundingClientRect();"
        " plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 1,"
        " clientY: box.top + 5, bubbles: true})); })()"
    )
    marks = "[...document.querySelectorAll('.mark')].filter((m) => m.getAttribute('d')).length"
    assert tab.run(marks) == 8


def test_a_table_shows_that_it_scrolls(edge: ServedEdge, tab: Tab) -> None:
    recent = RecentPlacements()
    placed(recent, "req-1", D1, P1)
    tab.resize(360, 800)
    edge.show(replace(PAIR, placements=recent))
    tab.goto(edge.url)
    tab.wait("document.querySelectorAll('#placements tbody tr').length == 1")
    box = "document.querySelector('#placements').parentElement"
    assert tab.run(f"{box}.scrollWidth > {box}.clientWidth")
    shadows = tab.run(f"getComputedStyle({box}).backgroundAttachment")
    assert shadows.split(", ") == ["local", "local", "scroll", "scroll", "scroll"]
