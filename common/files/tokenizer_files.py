"""What routers and nodes must both know of a tokenizer's files: its end, and what a model can draw.

Both read the same folder, so that they stop at the same tokens and compile the same grammars.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files.kept_files import KeptFiles

MAX_PLAIN_CHARS = 8


def tokenizer_end_ids(folder: Path, files: KeptFiles | None = None) -> frozenset[int]:
    """Return the end token that the tokenizer's files name, beside those of the model's files.

    Fine-tunes often change it there alone. Raises `CheckpointError` for a file that is no JSON.
    """
    files = KeptFiles() if files is None else files
    path = folder / "tokenizer.json"
    end = _end_text(folder, files)
    if end is None or not files.has(path):
        return frozenset()
    layout = _read(path, files)
    for added in layout.get("added_tokens") or []:
        if added.get("content") == end:
            return frozenset({int(added["id"])})
    vocab = (layout.get("model") or {}).get("vocab") or {}
    ids = vocab if isinstance(vocab, dict) else {one[0]: at for at, one in enumerate(vocab)}
    return frozenset({ids[end]} if end in ids else ())


def plain_tokens_digest(folder: Path, files: KeptFiles | None = None) -> str:
    """Return what tells tokenizers apart: a digest of the ids of short words; empty: unknown.

    Of one tokenizer it is the same from every form of its file: how special tokens, bytes and
    spaces are written, and what fills up a vocabulary, does not count.
    """
    files = KeptFiles() if files is None else files
    path = folder / "tokenizer.json"
    if not files.has(path):
        return ""
    try:
        vocab = _read(path, files)["model"]["vocab"]
        if isinstance(vocab, list):
            vocab = {one[0]: at for at, one in enumerate(vocab)}
        plain = sorted(
            (at, token)
            for token, at in vocab.items()
            if len(token) <= MAX_PLAIN_CHARS and token.isascii() and token.isalnum()
        )
    except (CheckpointError, AttributeError, LookupError, TypeError):  # others tell of it
        return ""
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16] if plain else ""


def known_ids(token_ids: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Return those of some token ids that a model of `vocab_size` tokens has."""
    return frozenset(one for one in token_ids if 0 <= one < vocab_size)


def within_vocabulary(tokenizer: str, vocab_size: int) -> str:
    """Return a tokenizer, as JSON, without the tokens that a model of `vocab_size` tokens lacks.

    It is the same text where there are none. What such a token spelled is spelled with other ones.
    """
    layout = json.loads(tokenizer)
    model = layout["model"]
    vocab, added = model.get("vocab") or {}, layout.get("added_tokens") or []
    if isinstance(vocab, dict):
        kept: Any = {token: at for token, at in vocab.items() if at < vocab_size}
    else:
        kept = vocab[:vocab_size]
    kept_added = [one for one in added if one["id"] < vocab_size]
    if len(kept) == len(vocab) and len(kept_added) == len(added):
        return tokenizer
    model["vocab"], layout["added_tokens"] = kept, kept_added
    if model.get("merges"):
        gone = vocab.keys() - kept.keys()
        model["merges"] = [one for one in model["merges"] if not _spells(one, gone)]
    return json.dumps(layout, ensure_ascii=False)


def _spells(merge: Any, tokens: set[str]) -> bool:
    """Return whether a merge joins, or makes, one of some tokens."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return not tokens.isdisjoint((left, right, left + right))


def _end_text(folder: Path, files: KeptFiles) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if files.has(path):
            token = _read(path, files).get("eos_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return text
    return None


def _read(path: Path, files: KeptFiles) -> dict[str, Any]:
    try:
        value = json.loads(files.read(path) or b"")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}: wanted a JSON object")
    return value
