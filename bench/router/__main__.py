"""The cost of a router: `python -m bench.router --json`.

A router as `pdserve serve --role router` runs it, with a real Redis server, between streaming
clients and a prefill and a decode node that answer at once (`node_stand_in.py`): each request is a
chat of some 75 prompt tokens that is tokenised, placed, reserved, handed off and answered with 64
tokens, each of them turned into text and sent as an event of its own. Every answer is counted, one
is compared with the text it must be. The router has one core to itself; nodes, clients and Redis
share another.

    c1, c32, c128    that many clients, each with one request at a time over a kept connection
      tokens_per_s, requests_per_s
      tokens_per_event   near 1: tokens that come out of order leave together, in one event
      ttft_added_ms_p50, _p99   request sent to first token's event; the nodes take no time, so all
                     of it counts as added, both calls to the nodes included
      cpu_share      CPU seconds per second of each process: the router is to be near 1 at 128, the
                     others together below
    cpu_s_per_1k_requests       of the router, at 128 clients
    paced            128 clients, and nodes that take 10 ms for each token after the first
    rss_growth       the router's memory after --rss-requests, at 128 clients, over that after a
                     tenth of them
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command import flags_of, print_figures
from bench.router.load import LoadResult, LoadSpec, figures
from bench.router.node_stand_in import answers
from bench.router.processes import RunningSystem, running_system
from pdserve.checkpoints.demo_model import demo_model_folder
from router.text.text_model import TextModel

NUM_TOKENS = 64
STREAMS = (1, 32, 128)
PACED_STEP_S = 0.01
_TEXT = Path(__file__).resolve().parent.parent.parent / "LICENSE"
_WARM_UP_S = 1.0
_NUM_PROGRESS_REPORTS = 10


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what was asked for, with the tokenizer of the model in `folder`."""
    model = TextModel.load(folder, "", 0)
    text = _TEXT.read_text(encoding="utf-8")
    pieces = answers(model.encode(text, add_special_tokens=False, param="text"), NUM_TOKENS)
    texts = {model.decode(piece) for piece in pieces}
    result: dict[str, Any] = {}
    with running_system(folder, pieces, 0.0) as system:
        _check(system, texts)
        for num_streams in STREAMS:
            result[f"c{num_streams}"] = _timed(system, num_streams, options.seconds)
    result["cpu_s_per_1k_requests"] = result[f"c{STREAMS[-1]}"]["cpu_s_per_1k_requests"]
    with running_system(folder, pieces, PACED_STEP_S) as system:
        _check(system, texts)
        result["paced"] = _timed(system, STREAMS[-1], options.seconds)
    if options.rss_requests:
        with running_system(folder, pieces, 0.0) as system:
            result["rss_growth"] = round(_rss_growth(system, options.rss_requests), 4)
    return result


def _check(system: RunningSystem, texts: set[str]) -> None:
    text = system.load.call("text", NUM_TOKENS)
    if text not in texts:
        raise RuntimeError(f"the answer differs from the nodes' tokens: {text!r}")


def _timed(system: RunningSystem, num_streams: int, seconds: float) -> dict[str, Any]:
    print(f"{num_streams} streams for {seconds:g} s", file=sys.stderr)
    _run(system, LoadSpec(num_streams=num_streams, num_tokens=NUM_TOKENS, duration_s=_WARM_UP_S))
    before = system.cpu_s()
    loaded = _run(
        system, LoadSpec(num_streams=num_streams, num_tokens=NUM_TOKENS, duration_s=seconds)
    )
    used = {name: after_s - before[name] for name, after_s in system.cpu_s().items()}
    return figures(loaded, used)


def _rss_growth(system: RunningSystem, num_requests: int) -> float:
    part = max(1, num_requests // _NUM_PROGRESS_REPORTS)
    sizes = []
    for number in range(1, _NUM_PROGRESS_REPORTS + 1):
        _run(
            system,
            LoadSpec(num_streams=STREAMS[-1], num_tokens=NUM_TOKENS, num_requests=part),
        )
        sizes.append(system.router_rss_bytes())
        print(f"{number * part} requests: {sizes[-1] / 1e6:.1f} MB", file=sys.stderr)
    return sizes[-1] / sizes[0]


def _run(system: RunningSystem, spec: LoadSpec) -> LoadResult:
    result: LoadResult = system.load.call("run", spec)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.router", __doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each timed load")
    parser.add_argument(
        "--rss-requests", type=int, default=100_000, help="for the memory's growth; 0: not measured"
    )
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.rss_requests < 0:
        parser.error("wanted seconds above 0 and no negative number of requests")
    print_figures(measure(options, demo_model_folder()), is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
