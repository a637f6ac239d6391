"""Read the small files of a checkpoint folder that the router needs: no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import CheckpointError
from common.files.kept_files import KeptFiles
from common.files.tokenizer_files import within_vocabulary

MAX_JSON_BYTES = 64 << 20

DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of chat templates that are read: of any chat, and of one with tools."""


def read_json(path: Path, files: KeptFiles) -> dict[str, Any]:
    """Return the JSON object in `path`; `CheckpointError` names the file and the problem."""
    try:
        content = files.read(path, MAX_JSON_BYTES + 1)
        if content is None:
            raise CheckpointError(f"{path} is missing")
        if len(content) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}: wanted a JSON object")
    return value


def read_json_if_there(path: Path, files: KeptFiles) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one without a file."""
    return read_json(path, files) if files.has(path) else {}


def read_tokenizer(folder: Path, vocab_size: int, files: KeptFiles) -> Tokenizer:
    """Read `tokenizer.json`, without padding and truncation that training may have left in it.

    Tokens that the model does not have, of which there are `vocab_size`, are left out.

    Raises `CheckpointError` when it is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not files.has(path):
        raise CheckpointError(f"{path} is missing")
    try:
        content = files.read(path) or b""
        tokenizer = Tokenizer.from_buffer(content)
        if max(tokenizer.get_vocab().values(), default=0) >= vocab_size:
            tokenizer = Tokenizer.from_str(within_vocabulary(content.decode(), vocab_size))
    except Exception as error:  # the library raises bare `Exception`
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def read_chat_templates(
    folder: Path, tokenizer_config: dict[str, Any], files: KeptFiles
) -> dict[str, str]:
    """Return the chat templates of a checkpoint by name, of `DEFAULT` and `TOOL_USE` those it has.

    They are in tokenizer_config.json, where one without a name is the default; files in the folder
    go before these. One that stands alone is the default, whatever its name. Raises
    `CheckpointError` for one that cannot be read or is not text.
    """
    named = tokenizer_config.get("chat_template")
    if isinstance(named, list):
        named = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
    elif not isinstance(named, dict):
        named = {DEFAULT: named}
    templates = {name: named[name] for name in (DEFAULT, TOOL_USE) if named.get(name) is not None}
    for name, template in templates.items():
        if not isinstance(template, str):
            raise CheckpointError(
                f"chat_template in {folder / 'tokenizer_config.json'} is a "
                f"{type(template).__name__} ({name}): wanted text"
            )
    more = folder / "additional_chat_templates"
    for name, path in (
        (DEFAULT, folder / "chat_template.jinja"),
        (TOOL_USE, more / f"{TOOL_USE}.jinja"),
    ):
        if files.has(path):
            templates[name] = _read_text(path, files)
    if templates and DEFAULT not in templates:
        templates[DEFAULT] = templates[TOOL_USE]
    return templates


def _read_text(path: Path, files: KeptFiles) -> str:
    try:
        return (files.read(path) or b"").decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def special_token_texts(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` etc. as text; each may be stored as text or as an object."""
    texts = {}
    for name, value in tokenizer_config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts
