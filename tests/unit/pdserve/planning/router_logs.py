"""Lines as a router logs them with `--log-format json`, and files of lines."""

from __future__ import annotations

import json
from pathlib import Path


def log_line(**changed: object) -> str:
    """The line of a request that was answered, with other fields; `...`: without one."""
    row = {
        "time": "2026-11-27T10:00:05.000Z",
        "level": "info",
        "logger": "pdserve.router.requests",
        "message": "request ended: ok",
        "role": "router",
        "node_id": "router",
        "model": "llama",
        "prompt_tokens": 100,
        "output_tokens": 20,
        "duration_ms": 5000.0,
    }
    return json.dumps({k: v for k, v in (row | changed).items() if v is not ...})


def written(tmp_path: Path, *lines: str) -> Path:
    """A file with these lines."""
    path = tmp_path / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path
