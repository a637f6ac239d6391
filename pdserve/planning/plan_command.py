"""`pdserve plan`: flags in, an answer out. Trials are shown on stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from common.errors import ConfigError
from common.settings.config import Config
from pdserve.configuration.option_values import count_from_text
from pdserve.planning.answer import PlannedNodes, TrialPlanner, Wanted
from pdserve.planning.page import page_of
from pdserve.planning.shown import as_json, as_text, story_of
from pdserve.planning.trial import run_story, setup_of
from pdserve.planning.wanted import checked_page, wanted_of


def run_plan(parsed: argparse.Namespace, config: Config) -> None:
    """Plan and print. Raises `ConfigError` for wrong flags, `TargetsOutOfReach`."""
    wanted = wanted_of(parsed, config)
    page = None if parsed.page is None else checked_page(parsed.page)
    request = _explained(parsed.explain, wanted)
    workload = wanted.workload
    if workload.is_sampled:
        tell(
            f"trials serve {workload.num_in_window} of {len(workload.requests)} requests: "
            "the busiest part first, and another part for each further seed"
        )
    began_s = time.monotonic()
    answer = TrialPlanner(
        wanted, lambda line: tell(f"{time.monotonic() - began_s:5.0f} s  {line}")
    ).answer()
    if parsed.json:
        print(json.dumps(as_json(answer), ensure_ascii=False))
    else:
        print(as_text(answer), end="")
    if request is not None:
        print(_story(answer, request), end="", file=sys.stderr if parsed.json else sys.stdout)
    if page is not None:
        _write_page(page, page_of(answer))


def _write_page(page: Path, text: str) -> None:
    """Write the plots, after the answer, which is not lost with a disk that is full."""
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error.strerror}") from None
    tell(f"{page} has the plots")


def tell(line: str) -> None:
    """Show what is being done, beside the output."""
    print(f"plan: {line}", file=sys.stderr, flush=True)


def _explained(text: str | None, wanted: Wanted) -> int | None:
    if text is None:
        return None
    most = len(wanted.workload.requests)
    count = count_from_text(text)
    if count is None or not 1 <= count <= most:
        raise ConfigError(
            f"--explain is {text!r}: wanted the number of a request by arrival, 1 to {most}"
        )
    return count


def _story(answer: PlannedNodes, request: int) -> str:
    wanted, workload = answer.wanted, answer.wanted.workload
    last = max(0, len(workload.requests) - workload.num_in_window)
    begin = min(last, max(0, request - 1 - workload.num_in_window // 2))
    setup = setup_of(wanted.profile, wanted.config, answer.best.shape, 0, wanted.at_once)
    served = run_story(setup, workload.from_index(begin), request - 1 - begin)
    return story_of(served, request, answer)
