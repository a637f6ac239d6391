"""What only a card can show, in one command: `python -m tests.gpu.on_card`.

Stages run in order, each alone: one that fails is reported and the rest goes on. It needs a card,
`triton` and `numpy`, no network and no model: weights are random, of a public model's shape. The
last lines are a table and one JSON line. `--out FILE` also writes the JSON into a file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.runner.gpu.launcher import KernelSpec
from tests.gpu.measuring import Card, SpecRecorder
from tests.gpu.stages import STAGES, UNASKED
from tests.gpu.stages.model import Findings

_COMPILING: list[KernelSpec] = []


def _compile(place: int) -> str:
    try:
        _COMPILING[place].compile(_CAPABILITY)
    except Exception as error:  # a configuration that does not compile is left out of its sweep
        return f"{_COMPILING[place].function.__name__}: {str(error)[-160:]!r}"
    return ""


_CAPABILITY = 90


def compile_all(specs: list[KernelSpec], num_processes: int) -> list[str]:
    """Compile kernels into Triton's cache, in processes that are forked before the driver opens."""
    _COMPILING[:] = specs
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        return [line for line in pool.imap_unordered(_compile, range(len(specs))) if line]


def run(names: list[str], out: Path | None) -> int:
    """Run the stages; return how many failed."""
    begun = time.monotonic()
    chosen: list[tuple[str, Callable[[Any, Findings], None]]] = [
        (name, stage)
        for name, stage in STAGES.items()
        if (name in names if names else name not in UNASKED)
    ]
    recorder = SpecRecorder()
    for name, stage in chosen:
        try:
            stage(recorder, Findings())
        except Exception:
            print(f"plan of {name}:", traceback.format_exc(), flush=True)
    problems = compile_all(recorder.specs, multiprocessing.cpu_count())
    print(
        f"{len(recorder.specs)} kernels, {len(problems)} do not compile: {problems[:3]}; "
        f"{time.monotonic() - begun:.0f} s", flush=True
    )  # fmt: skip
    findings = Findings()
    card = Card()
    findings["card"] = card.device.properties.name
    failed = 0
    for name, stage in chosen:
        started = time.monotonic()
        try:
            stage(card, findings)
            result = "ok"
        except Exception:
            failed += 1
            result = traceback.format_exc()
        print(f"== {name}: {result} ({time.monotonic() - started:.1f} s)", flush=True)
        if out is not None:
            out.write_text(json.dumps(findings))
    print(json.dumps(findings.summary()))
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--out", type=Path, help="a file for the whole JSON")
    given = parser.parse_args()
    sys.exit(1 if run(given.stages, given.out) else 0)
