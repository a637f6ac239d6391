"""Names of models: those that `--model` knows, and those under which a model is served."""

from __future__ import annotations

DEMO_MODEL = "demo"
KNOWN_MODELS = (DEMO_MODEL, "qwen2.5-coder-0.5b")
"""What `--model` may name besides paths; they are fetched where they are not there."""

MOST_NAMES = 16


def model_names(text: str) -> tuple[str, ...]:
    """Return the names of a model, separated by commas; the first is the one that answers have."""
    return tuple(name.strip() for name in text.split(","))


def are_model_names(text: str) -> bool:
    """Return whether `text` is empty, or some different names that are not."""
    names = model_names(text)
    return not text or (all(names) and len(names) == len(set(names)) <= MOST_NAMES)
