"""A config file's values, checked as they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files.model_config import MOST_POSITIONS

_MAX_JSON_BYTES = 64 << 20
_MAX_SHOWN = 200
_AT_MOST = {
    "num_hidden_layers": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": MOST_POSITIONS,
    "original_max_position_embeddings": MOST_POSITIONS,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "moe_num_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "n_shared_experts": 1 << 16,
    "moe_intermediate_size": 1 << 24,
    "moe_num_shared_experts": 1 << 16,
}
"""Far beyond any model: a file with larger numbers is broken, and would take memory."""

_LEAST_NUMBER, _MOST_NUMBER = 1e-15, 1e30
"""Beyond these, what is computed of two numbers may be no float32."""


class ConfigValues:
    """A config file's keys, with errors that name the file, the key and the expected value."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self._path, self._values, self._prefix = path, values, prefix

    def refuse(self, key: str, wanted: str) -> CheckpointError:
        found = repr(self._values[key])[:_MAX_SHOWN] if key in self._values else "missing"
        return CheckpointError(f"{self._path}: {self._prefix}{key} is {found}: wanted {wanted}")

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def given_keys(self) -> list[str]:
        """Return the keys whose values are not null."""
        return [key for key, value in self._values.items() if value is not None]

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"a whole number of at least {least}")
        if value > _AT_MOST.get(key, value):
            raise self.refuse(key, f"at most {_AT_MOST[key]}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not _LEAST_NUMBER <= value <= _MOST_NUMBER
        ):
            raise self.refuse(key, f"a number above 0, {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def section(self, key: str) -> ConfigValues | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return ConfigValues(self._path, value, f"{self._prefix}{key}.")

    def alone(self, key: str, name: str) -> ConfigValues:
        """Return the object at `key` as the only one, under `name`."""
        section = self.section(key)
        if section is None:
            raise self.refuse(key, "an object")
        return ConfigValues(self._path, {name: section._values}, self._prefix)

    def sections(self) -> list[ConfigValues]:
        """Return all values, which are objects."""
        found = (self.section(key) for key in self._values)
        return [one for one in found if one is not None]


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; `CheckpointError` if the file is missing or holds none."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes: wanted at most {_MAX_JSON_BYTES}")
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: no JSON object: wanted one")
    return values
