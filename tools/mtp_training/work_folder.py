"""The work folder: the finished parts of a run, so that a second start continues it.

    settings.json        what the run was started with; another start must agree
    messages.json        user messages that the model wrote itself
    answers-00000.npz    conversations with their hidden states, some dozens per file
    start.npz            the draft vocabulary's order and the weights before the first step
    training.pdparams    weights, optimizer state and step of the latest training checkpoint
    log.json             loss and held-out acceptance by step

Every file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and its greedy answer.

    `states` are float16 `[len(token_ids) - 1, hidden_size]`: the last token was never computed on.
    """

    key: str
    token_ids: np.ndarray
    prompt_len: int
    states: np.ndarray


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write `path` by calling `write` with a temporary path beside it, then rename that."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class WorkFolder:
    """One run's files."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or make it; `ConfigError` when it belongs to a run with other `settings`."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        kept = self.read_json("settings.json")
        if kept is None:
            self.write_json("settings.json", settings)
            return
        for name, wanted in settings.items():
            if kept.get(name) != wanted:
                raise ConfigError(
                    f"{path}: this work folder was begun with {name} {kept.get(name)!r}, not "
                    f"{wanted!r}: wanted the same, or another --work-folder"
                )

    def read_json(self, name: str) -> Any:
        """Return a JSON file's value, None without a file; `CheckpointError` if it is broken."""
        path = self.path / name
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(f"{path}: not readable as JSON: {error}") from error

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        text = json.dumps(value, indent=1) + "\n"
        write_whole(self.path / name, lambda path: path.write_text(text, encoding="utf-8"))

    def read_arrays(self, name: str) -> dict[str, np.ndarray] | None:
        """Return the arrays of a file by name, None when it does not exist."""
        path = self.path / name
        if not path.exists():
            return None
        with np.load(path) as arrays:
            return dict(arrays)

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Write a file of named arrays."""
        write_whole(self.path / name, lambda path: np.savez(path, allow_pickle=False, **arrays))

    def add_conversations(self, conversations: list[Conversation]) -> None:
        """Write one more file of conversations."""
        arrays = {
            "keys": np.array([c.key for c in conversations]),
            "lengths": np.array([len(c.token_ids) for c in conversations]),
            "prompt_lengths": np.array([c.prompt_len for c in conversations]),
            "token_ids": np.concatenate([c.token_ids for c in conversations]).astype(np.int32),
            "states": np.concatenate([c.states for c in conversations]),
        }
        self.write_arrays(f"answers-{len(self._answer_paths()):05}.npz", arrays)

    def conversations(self) -> list[Conversation]:
        """Return all finished conversations, in the order in which they finished."""
        return [c for path in self._answer_paths() for c in _read_conversations(path)]

    def _answer_paths(self) -> list[Path]:
        return sorted(self.path.glob("answers-*.npz"))


def _read_conversations(path: Path) -> list[Conversation]:
    with np.load(path) as arrays:
        keys, lengths = arrays["keys"], arrays["lengths"]
        prompt_lengths = arrays["prompt_lengths"]
        token_ids, states = arrays["token_ids"], arrays["states"]
    found, token, state = [], 0, 0
    for key, length, prompt_len in zip(keys, lengths, prompt_lengths, strict=True):
        found.append(
            Conversation(
                str(key),
                token_ids[token : token + length],
                int(prompt_len),
                states[state : state + length - 1],
            )
        )
        token, state = token + int(length), state + int(length) - 1
    return found
