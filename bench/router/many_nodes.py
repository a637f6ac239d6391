"""What a request costs a router that hears many nodes: `python -m bench.router.many_nodes --json`.

The router, Redis, clients and the two nodes that answer are those of `python -m bench.router`. The
other nodes are registered, are heard over streams of their own, and have no free seat
(`idle_nodes.py`): each request is placed among all of them and served by the two. The sizes are
measured in turn, in systems that run at the same time; of each figure the median of `--rounds`.

    idle_share       CPU of the router by number of nodes, as a share of a core, without requests:
                     its streams, its reading of the registry, and all else
    request_us       CPU of the router per request beyond that without requests, by number of nodes,
                     at `--streams` clients with one request each
    growth           request_us of the largest size / that of the smallest, less 1
    requests_per_s   what these clients got
    redis_commands   of Redis per request, also inside of scripts, beyond those without requests
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redis import Redis

from bench.command import flags_of, print_figures
from bench.router.load import LoadSpec
from bench.router.node_stand_in import answers
from bench.router.processes import RunningSystem, running_system
from pdserve.checkpoints.demo_model import demo_model_folder
from router.text.text_model import TextModel

SIZES = (2, 100, 1000)
NUM_TOKENS = 64
NUM_STREAMS = 32
SETTLE_S = 12.0
"""A wait after which idle nodes are asked rarely."""
WARM_UP = 200
"""The first requests are dearer."""
_TEXT = Path(__file__).resolve().parent.parent.parent / "LICENSE"


def measure(
    sizes: Sequence[int], num_rounds: int, seconds: float, num_streams: int, folder: Path
) -> dict[str, Any]:
    """Return the figures, with the tokenizer of the model in `folder`."""
    model = TextModel.load(folder, "", 0)
    text = _TEXT.read_text(encoding="utf-8")
    pieces = answers(model.encode(text, add_special_tokens=False, param="text"), NUM_TOKENS)
    found: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        systems = {
            size: stack.enter_context(running_system(folder, pieces, 0.0, num_nodes=size))
            for size in sizes
        }
        for system in systems.values():
            system.load.call(
                "run",
                LoadSpec(num_streams=num_streams, num_tokens=NUM_TOKENS, num_requests=WARM_UP),
            )
        time.sleep(SETTLE_S)
        for number in range(num_rounds):
            for size, system in systems.items():
                print(f"round {number + 1}, {size} nodes", file=sys.stderr)
                for name, value in _round(system, seconds, num_streams).items():
                    found[name][str(size)].append(value)
    figures: dict[str, Any] = {
        name: {size: round(statistics.median(values), 4) for size, values in of.items()}
        for name, of in found.items()
    }
    first, last = str(sizes[0]), str(sizes[-1])
    figures["growth"] = round(figures["request_us"][last] / figures["request_us"][first] - 1, 3)
    return figures


def _round(system: RunningSystem, seconds: float, num_streams: int) -> dict[str, float]:
    cpu_s, commands = system.cpu_s()["router"], _num_commands(system)
    time.sleep(seconds)
    idle_cpu_s = system.cpu_s()["router"] - cpu_s
    idle_commands = _num_commands(system) - commands
    cpu_s, commands = system.cpu_s()["router"], _num_commands(system)
    spec = LoadSpec(num_streams=num_streams, num_tokens=NUM_TOKENS, duration_s=seconds)
    loaded = system.load.call("run", spec)
    cpu_s = system.cpu_s()["router"] - cpu_s - idle_cpu_s * loaded.seconds / seconds
    if system.num_misplaced():
        raise RuntimeError(f"{system.num_misplaced()} requests were given to idle nodes")
    commands = _num_commands(system) - commands - idle_commands * loaded.seconds / seconds
    return {
        "idle_share": idle_cpu_s / seconds,
        "request_us": 1e6 * cpu_s / loaded.num_requests,
        "requests_per_s": loaded.num_requests / loaded.seconds,
        "redis_commands": max(0.0, commands) / loaded.num_requests,
    }


def _num_commands(system: RunningSystem) -> int:
    """Return how many commands Redis has run; asking adds the same few each time."""
    with Redis.from_url(system.redis_url) as redis:
        stats: dict[str, Any] = redis.info("commandstats")
    return sum(int(one["calls"]) for one in stats.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = flags_of("bench.router.many_nodes", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each figure")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load, and idle")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS, help="clients")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.seconds, options.streams) <= 0:
        parser.error("wanted rounds, seconds and streams above 0")
    figures = measure(SIZES, options.rounds, options.seconds, options.streams, demo_model_folder())
    print_figures(figures, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
