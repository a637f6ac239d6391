"""Scheduling policies on traces: `python -m bench.policies --trace FILE`.

Every row of `bench/replay/rows.py` serves the same requests on pools of several sizes, at several
loads: the real scheduler core on a virtual clock (`bench/replay/`), so that the figures are the
same on every machine. With `--json` the last line holds all of them; `bench/replay/figures.py`
defines them. `--plot FOLDER` draws two pictures per trace (needs matplotlib).

`--set preemption_mode=swap`, or any other scheduling option, holds for all replays that do not set
it themselves; so do `--cost` and the node's limits. Without `--pool-blocks` the pools hold about 8,
24 and 72 mean requests of the trace, prompt and output, and at least the longest one. At a load of
1 arrivals are scaled so that the modelled GPU would compute all the time if it never ran out of
blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.replay.comparison import Cell, Comparison, TraceLoad, compare, ranking
from bench.replay.load import LOADS, default_pools, speed_up_for
from bench.replay.replay import DEFAULT_BLOCK_SIZE, ReplaySetup
from bench.replay.tables import RANKING_COLUMNS, table_of, tables_of
from common.errors import ConfigError
from common.settings.config import SchedulingConfig
from simulator.step_cost import StepCost
from simulator.trace_file import read_trace


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare scheduling policies on request traces.")
    parser.add_argument(
        "--trace", type=Path, required=True, nargs="+", help="Azure or Mooncake traces"
    )
    parser.add_argument("--requests", type=int, default=500, help="of each trace, from its start")
    parser.add_argument("--pool-blocks", help="pool sizes, e.g. 512,1024,2048 (default: by trace)")
    parser.add_argument(
        "--loads", default=",".join(f"{load:g}" for load in LOADS), help="such as 0.7,1.5"
    )
    parser.add_argument("--seats", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument(
        "--set", action="append", default=[], help="NAME=VALUE of the scheduling configuration"
    )
    parser.add_argument(
        "--cost", action="append", default=[], help="NAME=SECONDS of simulator/step_cost.py"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the clients' choices")
    parser.add_argument("--plot", type=Path, help="draw pictures into this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("requests", 1), ("seats", 1), ("budget", arguments.seats), ("seed", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise ConfigError(f"--{name} is {value}: wanted at least {least}")
    names = [path.stem for path in arguments.trace]
    if len(set(names)) < len(names):
        raise ConfigError(f"--trace names {', '.join(names)}: wanted different file names")


def _pools(text: str) -> tuple[int, ...]:
    pools = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(pools) < 2 or len(set(pools)) < len(pools):
        raise ConfigError(
            f"--pool-blocks is {text!r}: wanted different numbers of at least 2, like 512,1024"
        )
    return pools


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share <= 100 for share in shares) or len(set(shares)) < len(shares):
        raise ConfigError(f"--loads is {text!r}: wanted different shares above 0, like 0.7,1.5")
    return shares


def _scheduling_config(settings: Sequence[str]) -> SchedulingConfig:
    """Return what all replays share; each row's own settings replace those named here."""
    known: dict[str, Any] = asdict(SchedulingConfig())
    changed: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known or isinstance(known[name], bool):
            names = ", ".join(n for n, default in known.items() if not isinstance(default, bool))
            raise ConfigError(f"--set {setting!r}: wanted NAME=VALUE with one of {names}")
        try:
            changed[name] = type(known[name])(text)
        except ValueError as error:
            raise ConfigError(f"--set {setting!r}: {error}") from error
    config = SchedulingConfig(**changed)
    if problems := config.problems():
        raise ConfigError("; ".join(problem.text for problem in problems))
    return config


def _loads(arguments: argparse.Namespace, cost: StepCost) -> list[TraceLoad]:
    loads, shares = [], _shares(arguments.loads)
    for path in arguments.trace:
        requests = read_trace(path, arguments.requests)
        pools = default_pools(requests, DEFAULT_BLOCK_SIZE)
        if arguments.pool_blocks is not None:
            pools = _pools(arguments.pool_blocks)
        speed_ups = {share: speed_up_for(share, requests, cost) for share in shares}
        loads.append(TraceLoad(path.stem, requests, pools, speed_ups))
    return loads


def _say_progress(cell: Cell, number: int, total: int) -> None:
    print(
        f"{number}/{total}: {cell.trace}, {cell.num_blocks} blocks, load {cell.load:g}, {cell.row}",
        file=sys.stderr,
    )


def _draw(comparison: Comparison, loads: Sequence[TraceLoad], folder: Path) -> None:
    from bench.replay.pictures import draw_comparison, draw_course

    for load in loads:
        draw_comparison(comparison, load, folder / f"policies_{load.name}.svg")
        draw_course(comparison, load, folder / f"course_{load.name}.svg")


def _prepare_folder(folder: Path) -> None:
    """Check before minutes of work that the pictures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib (pip install '.[bench]'): {error}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {folder}: {error}") from error


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Replay everything, print the tables, draw; return the content of the JSON line."""
    _check(arguments)
    cost = StepCost().with_settings(arguments.cost)
    base = _scheduling_config(arguments.set)
    loads = _loads(arguments, cost)
    if arguments.plot is not None:
        _prepare_folder(arguments.plot)
    setup = ReplaySetup(
        num_blocks=loads[0].pools[0],
        max_num_seqs=arguments.seats,
        max_num_batched_tokens=arguments.budget,
        seed=arguments.seed,
    )
    comparison = compare(loads, setup, cost, base, _say_progress)
    for load in loads:
        print(tables_of(comparison, load), end="\n\n")
    ranked = ranking(comparison.figures)
    print(table_of(ranked, "times as long as the best, all replays", RANKING_COLUMNS))
    if arguments.plot is not None:
        _draw(comparison, loads, arguments.plot)
    return {
        "traces": {
            load.name: {
                "requests": len(load.requests),
                "speed_ups": load.speed_ups,
                "pool_blocks": load.pools,
            }
            for load in loads
        },
        "scheduling": asdict(base),
        "runs": [
            {
                "trace": cell.trace,
                "pool_blocks": cell.num_blocks,
                "load": cell.load,
                "row": cell.row,
                **figures,
            }
            for cell, figures in comparison.figures.items()
        ],
        "ranking": [{"row": row, **summary} for row, summary in ranked],
        "overruns": sum(figures["overruns"] for figures in comparison.figures.values()),
    }


def main() -> None:
    arguments = _parser().parse_args()
    try:
        result = run(arguments)
    except ConfigError as error:
        sys.exit(str(error))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
