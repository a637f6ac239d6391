"""The cost of the live page: its first paint in a browser, and the router's CPU while it is open.

    python -m bench.live_page --json

A router with one prefill and one decode node of a tiny model, on loopback. The page is opened in a
headless Chromium `--loads` times for the first paint, which is the median. Then the CPU time of the
router process is measured over `--seconds` with no page open and with `--pages` open, `--rounds`
times in turn; a share is of one core. Meanwhile `--streams` requests are in progress, whose tokens
cost the same with and without a page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.nodes import Role
from tests.support.browser import Browser, find_chromium, running_browser
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.models.tiny_model import make_tiny_model, prompt_tokens
from tests.support.stores.redis_server import redis_server

SETTLE_S = 3.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chromium = find_chromium()
    if chromium is None:
        print("no Chromium here: `apt-get install chromium`", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="pdserve-live-page-") as folder:
        spec = _spec(Path(folder))
        with (
            redis_server() as redis,
            running([spec], redis, Path(folder)) as (cluster,),
            running_browser(chromium) as browser,
        ):
            figures = _measure(cluster, browser, options)
    print(json.dumps(figures) if options.json else _told(figures))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.live_page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--loads", type=int, default=11, help="pages loaded for the first paint")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each reading")
    parser.add_argument("--rounds", type=int, default=2, help="readings of each kind")
    parser.add_argument("--pages", type=int, default=1, help="pages open at once")
    parser.add_argument("--streams", type=int, default=0, help="requests in progress")
    return parser


def _spec(folder: Path) -> ClusterSpec:
    return ClusterSpec(
        name="live_page",
        model=make_tiny_model(folder / "tiny"),
        nodes=(NodeSpec("prefill-1", Role.PREFILL), NodeSpec("decode-1", Role.DECODE)),
        flags=("--block-size", "16", "--num-threads", "1", "--kv-cache-memory", "16MiB"),
    )


def _measure(
    cluster: Cluster, browser: Browser, options: argparse.Namespace
) -> dict[str, float | int]:
    paints_ms = [_first_paint_ms(browser, cluster.url) for _ in range(options.loads)]
    shares: dict[bool, list[float]] = {False: [], True: []}
    with _streaming(cluster.url, options.streams):
        for _ in range(options.rounds):
            for is_open in shares:
                with _open_pages(browser, cluster.url, options.pages if is_open else 0):
                    time.sleep(SETTLE_S)
                    shares[is_open].append(_cpu_share(cluster, options.seconds))
    closed, opened = statistics.mean(shares[False]), statistics.mean(shares[True])
    return {
        "first_paint_ms": round(statistics.median(paints_ms), 1),
        "first_paint_ms_max": round(max(paints_ms), 1),
        "router_cpu_share_open": round(opened, 5),
        "router_cpu_share_closed": round(closed, 5),
        "router_cpu_share_added": round(opened - closed, 5),
        "pages": options.pages,
        "streams": options.streams,
    }


def _first_paint_ms(browser: Browser, url: str) -> float:
    tab = browser.open_tab().resize(1240, 900)
    try:
        tab.goto(url)
        return tab.first_paint_ms()
    finally:
        tab.close()


@contextlib.contextmanager
def _open_pages(browser: Browser, url: str, count: int) -> Iterator[None]:
    tabs = [browser.open_tab() for _ in range(count)]
    try:
        for tab in tabs:
            tab.goto(url)
            tab.wait("document.querySelectorAll('.card').length == 2")
        yield
    finally:
        for tab in tabs:
            tab.close()


@contextlib.contextmanager
def _streaming(url: str, count: int) -> Iterator[None]:
    """Run `count` clients that stream one answer after the other."""
    is_over = threading.Event()

    def stream(number: int) -> None:
        with Api(url, "tiny") as api:
            while not is_over.is_set():
                prompt = prompt_tokens(100, salt=number)
                with api.stream(prompt=prompt, max_tokens=2000, ignore_eos=True) as answer:
                    while not is_over.is_set() and answer.read_event() is not None:
                        pass

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _cpu_share(cluster: Cluster, seconds: float) -> float:
    """Return the router's CPU time by wall time, over the next `seconds`."""
    process = cluster.processes["router-1"]
    before_s, began_at_s = _cpu_s(process.pid), time.monotonic()
    time.sleep(seconds)
    process.require_running()
    return (_cpu_s(process.pid) - before_s) / (time.monotonic() - began_at_s)


def _cpu_s(pid: int) -> float:
    """Return user and system time of a process, from `/proc`."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_S


def _told(figures: dict[str, float | int]) -> str:
    return "\n".join(f"{name:26} {value}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
