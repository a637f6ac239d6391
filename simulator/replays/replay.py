"""A recording, replayed: equal to its end, or up to the first decision that differs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.recording.file import read_recording
from simulator.replays.compared import Difference
from simulator.replays.placing_calls import replay_placing
from simulator.replays.step_calls import replay_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay. `num_decisions` were compared, up to the difference if there is one.

    `version` is that of the process that was recorded.
    """

    node_id: str
    version: str
    what: str
    num_decisions: int
    difference: Difference | None


def replay_recording(path: Path) -> Replayed:
    """Replay the file of a recording. Raises `ConfigError`, which says what is wrong in it."""
    header, _ = read_recording(path)
    replays = {"placing": ("placements", replay_placing), "steps": ("steps", replay_steps)}
    name = header.get("of")
    if name not in replays:
        raise ConfigError(f"{path} is a recording of {name!r}: wanted {' or '.join(replays)}")
    what, replay = replays[name]
    try:
        compared = replay(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return Replayed(
        node_id=str(header.get("node_id")),
        version=str(header.get("version")),
        what=what,
        num_decisions=compared.num_decisions,
        difference=compared.difference,
    )
