"""The flags of `pdserve plan`, checked: what is wrong is said in one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError
from common.files.cache_folder import full_path
from common.observing.latency import LatencyTargets
from common.settings.config import Config, SpeculationConfig
from pdserve.configuration.option_values import count_from_text
from pdserve.planning.answer import MOST_NODES, Wanted
from pdserve.planning.lengths import lengths_of
from pdserve.planning.workload import Workload, drawn_workload, trace_workload
from simulator.profile import FOLDER, DeviceProfile, facts_of, profile_names, read_profile

MOST_SEEDS, MOST_IN_TRIAL = 30, 100_000
_LEAST_ATTAIN, _MOST_ATTAIN = 0.5, 0.999


def wanted_of(parsed: argparse.Namespace, config: Config) -> Wanted:
    """Return what the flags want, with the settings of the nodes. Raises `ConfigError`."""
    targets = LatencyTargets(
        ttft_s=_number(parsed.ttft, "--ttft", "milliseconds above 0", lambda n: n > 0) / 1e3,
        tpot_s=_number(parsed.tpot, "--tpot", "milliseconds above 0", lambda n: n > 0) / 1e3,
    )
    attain = _number(
        parsed.attain, "--attain", f"a share from {_LEAST_ATTAIN} to {_MOST_ATTAIN}, such as 0.9",
        lambda n: _LEAST_ATTAIN <= n <= _MOST_ATTAIN,
    )  # fmt: skip
    seeds = _integer(parsed.seeds, "--seeds", 1, MOST_SEEDS)
    nodes = None if parsed.nodes is None else _integer(parsed.nodes, "--nodes", 1, MOST_NODES)
    at_once = 0
    if parsed.at_once is not None:
        at_once = _integer(parsed.at_once, "--at-once", 1, MOST_NODES)
    most = None
    if parsed.requests is not None:
        most = _integer(parsed.requests, "--requests", 20, MOST_IN_TRIAL)
    if (parsed.trace is None) == (parsed.rate is None and parsed.lengths is None):
        raise ConfigError("the load is wanted as --trace FILE, or as --rate with --lengths")
    config = replace(config, speculation=SpeculationConfig())
    if parsed.trace is None:
        profile = read_named_profile(parsed.profile, parsed.of_model)
        workload = _drawn(parsed, _longest(profile, config), most)
    else:
        path = full_path(parsed.trace)
        profile = read_named_profile(parsed.profile, parsed.of_model)
        workload = trace_workload(path, _longest(profile, config), most, parsed.of_model)
        _check_model(parsed.profile, profile, workload)
    if parsed.of_model and not workload.model and parsed.profile in profile_names():
        raise ConfigError(
            f"--model is {parsed.of_model!r}, and neither the load nor the profile "
            f"{parsed.profile} has names of models: wanted a file of `pdserve profile FILE --model "
            "…`, or no --model"
        )
    return Wanted(
        profile=profile, config=config, workload=workload, targets=targets, attain=attain,
        seeds=seeds, num_nodes=nodes, at_once=at_once,
    )  # fmt: skip


def read_named_profile(text: str, model: str) -> DeviceProfile:
    """Return a profile that comes with pdserve, or that of a file, which has to be of `model`.

    Raises `ConfigError`.
    """
    if text in profile_names():
        return read_profile(FOLDER / f"{text}.json")
    path = full_path(text)
    if not path.exists() and "/" not in text and not text.endswith(".json"):
        raise ConfigError(
            f"--profile is {text!r}: wanted a file of `pdserve profile`, or "
            f"{', '.join(profile_names())}"
        )
    return read_profile(path, model=model)


def _check_model(text: str, profile: DeviceProfile, workload: Workload) -> None:
    if text in profile_names() or not workload.model or workload.model == profile.model:
        return
    raise ConfigError(
        f"--profile {text} is of the model {profile.model}, and the requests of {workload.source} "
        f"are for {workload.model}: wanted a profile of that model"
    )


def _longest(profile: DeviceProfile, config: Config) -> int:
    return facts_of(profile, config.engine.block_size).max_model_len


def _drawn(parsed: argparse.Namespace, max_model_len: int, most: int | None) -> Workload:
    if parsed.rate is None or parsed.lengths is None:
        missing = "--rate" if parsed.rate is None else "--lengths"
        raise ConfigError(f"{missing} is missing: wanted --rate R with --lengths PROMPT:OUTPUT")
    rate = _number(
        parsed.rate, "--rate", "requests per second, above 0 and at most 10000",
        lambda n: 0 < n <= 1e4,
    )  # fmt: skip
    return drawn_workload(rate, lengths_of(parsed.lengths), max_model_len, most)


def checked_page(text: str) -> Path:
    """Return where the page is written. Raises `ConfigError` before anything is tried."""
    path = full_path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--page is {text!r}: wanted a file in a folder that exists")
    return path


def _number(text: str, flag: str, wanted: str, is_good: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not is_good(number) or number == float("inf"):
        raise ConfigError(f"{flag} is {text!r}: wanted {wanted}")
    return number


def _integer(text: str, flag: str, least: int, most: int) -> int:
    count = count_from_text(text)
    if count is None or not least <= count <= most:
        raise ConfigError(f"{flag} is {text!r}: wanted a number from {least} to {most}")
    return count
