"""Settings that are worth a trial, each alone. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.settings.config import Config
from pdserve.planning.search import Fleet

WORTH = 0.03
"""The share of all requests that a setting must bring within the targets to be advised."""
_THRESHOLDS = (0, 256, 1024, 4096)
_FACTORS = (0.5, 2, 4)
_POLICIES = ("none", "global_ratio", "learned")


@dataclass(frozen=True, slots=True)
class Change:
    """One setting with another value: `key` names the setting, `flag` is what to type."""

    key: str
    flag: str
    config: Config


def changes(config: Config, shape: Fleet) -> list[Change]:
    """Return what may help a cluster of this shape, without what its configuration forbids."""
    return [one for one in _changes(config, shape) if not _breaks(one.config, config)]


def _breaks(changed: Config, config: Config) -> bool:
    return len(changed.problems()) > len(config.problems())


def with_changes(config: Config, chosen: list[Change]) -> Config:
    """Return a configuration with all of these changes, each of another setting."""
    for one in chosen:
        config = _ROOMS[one.key](config, one.config)
    return config


_ROOMS = {
    "local_prefill_threshold": lambda to, of: replace(to, handoff=of.handoff),
    "max_num_seqs": lambda to, of: replace(to, engine=of.engine),
    "reservation_policy": lambda to, of: replace(to, scheduling=of.scheduling),
}


def _changes(config: Config, shape: Fleet) -> Iterator[Change]:
    engine, handoff, scheduling = config.engine, config.handoff, config.scheduling
    if shape.prefill:
        for threshold in _THRESHOLDS:
            if threshold != handoff.local_prefill_threshold:
                changed = replace(handoff, local_prefill_threshold=threshold)
                yield _change(
                    "local_prefill_threshold", threshold, replace(config, handoff=changed)
                )
    for factor in _FACTORS:
        seats = max(1, int(engine.max_num_seqs * factor))
        changed_engine = replace(engine, max_num_seqs=seats)
        yield _change("max_num_seqs", seats, replace(config, engine=changed_engine))
    for policy in _POLICIES:
        if policy != scheduling.reservation_policy:
            changed_policy = replace(scheduling, reservation_policy=policy)
            yield _change("reservation_policy", policy, replace(config, scheduling=changed_policy))


def _change(key: str, value: object, config: Config) -> Change:
    return Change(key, f"--{key.replace('_', '-')} {value}", config)
