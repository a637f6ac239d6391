"""What only a card can show, in one command: `python -m tests.gpu.on_card`.

Stages run in order, each alone and within its own time limit: one that fails is reported, and the
rest runs in another process, on a card that is opened anew. It needs a card and what a node on one
has installed (`.[node,gpu]`), no network and no model: weights are random, of a public model's
shape. The last line but one is a JSON object, the last one says how many passed.
`--out FILE` also writes the JSON into a file.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from engine.runner.gpu.cuda_driver import capability_of, load_driver
from engine.runner.gpu.launcher import KernelSpec
from tests.gpu.card_process import CardProcess
from tests.gpu.measuring import Card, SpecRecorder
from tests.gpu.stages import STAGES, UNASKED
from tests.gpu.stages.model import Findings
from tests.gpu.timed import Phases

TOTAL_S = 460.0
"""Under eight minutes, which is what a card is lent for at a time."""
COMPILING_S, OPENING_S, STAGE_S = 240.0, 60.0, 90.0
LIMITS_S = {"sweep": 300.0, "step_forms": 300.0, "tile_forms": 300.0, "runner_bits": 180.0,
            "experts_step": 180.0, "runner_bytes": 180.0, "runner_steps": 300.0,
            "runner_quantised": 300.0}  # fmt: skip
"""Seconds of stages that run only when they are named."""

_COMPILING: list[tuple[KernelSpec, int]] = []
_ASKED = "from tests.gpu.on_card import own_capability; print(own_capability())"
_WITHOUT_CARD = 90


def _begin_compiling() -> None:
    """End by the pool's SIGTERM at once.

    This program's own handler raises: raised in the pool's own code, it can leave a process that
    does not end, and the pool waits for it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(place: int) -> str:
    spec, capability = _COMPILING[place]
    try:
        spec.compile(capability)
    except Exception as error:  # a configuration that does not compile is left out of its sweep
        return f"{spec.function.__name__}: {str(error)[-160:]!r}"
    return ""


def own_capability() -> int:
    """Return the first card's compute capability; where there is none, that of an H100."""
    try:
        return capability_of(load_driver(), 0) or _WITHOUT_CARD
    except ConfigError:
        return _WITHOUT_CARD


def capability_of_card() -> int:
    """Return `own_capability` of another process: this one forks before the driver opens."""
    command = [sys.executable, "-c", _ASKED]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def compile_all(specs: list[KernelSpec], num_processes: int, capability: int) -> list[str]:
    """Compile kernels into Triton's cache, in processes that are forked before the driver opens."""
    _COMPILING[:] = [(spec, capability) for spec in specs]
    with multiprocessing.get_context("fork").Pool(num_processes, _begin_compiling) as pool:
        return [line for line in pool.imap_unordered(_compile, range(len(specs))) if line]


def run(names: list[str], out: Path | None) -> int:
    """Run the stages; return how many failed."""
    chosen: dict[str, Callable[[Any, Findings], None]] = {
        name: stage
        for name, stage in STAGES.items()
        if (name in names if names else name not in UNASKED)
    }
    found = Findings()
    phases = Phases(TOTAL_S, found, out, found.summary)
    with phases.interruptible():
        # Kernels that are not compiled here are compiled in their stages.
        phases.run("compile", COMPILING_S, partial(compiled, chosen))
        _run_stages(chosen, phases, found)
        return phases.end()


def _run_stages(
    chosen: Mapping[str, Callable[[Any, Findings], None]], phases: Phases, found: Findings
) -> None:
    """Run stages in a process that holds the card, and in another one after each that failed."""
    waiting = list(chosen)
    process: CardProcess | None = None
    while waiting:
        if process is None:
            process = CardProcess(Card, chosen, found)
            if not phases.run("open", OPENING_S, process.open):
                found["not run"] = waiting
                break
        name = waiting.pop(0)
        if not phases.run(name, LIMITS_S.get(name, STAGE_S), partial(process.run, name)):
            process.close()
            process = None
    if process is not None:
        process.close()


def compiled(chosen: Mapping[str, Callable[[Any, Findings], None]]) -> dict[str, Any]:
    """Compile the kernels of stages. What cannot be compiled, or planned, fails in its stage."""
    capability = capability_of_card()
    recorder = SpecRecorder(capability)
    for name, stage in chosen.items():
        try:
            with redirect_stdout(io.StringIO()):  # nothing is found yet
                stage(recorder, Findings())
        except Exception:
            print(f"plan of {name}:", traceback.format_exc(), flush=True)
    problems = compile_all(recorder.specs, multiprocessing.cpu_count(), capability)
    return {
        "capability": capability,
        "kernels": len(recorder.specs),
        "not compiled": len(problems),
        "why": problems[:3],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen stages; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--out", type=Path, help="a file for the whole JSON")
    given = parser.parse_args(arguments)
    if unknown := set(given.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    return run(given.stages, given.out)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
