"""Read the small files of a checkpoint folder that the router needs: no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from common.errors import CheckpointError
from common.files.kept_files import KeptFiles
from common.files.tokenizer_files import TEMPLATE_FILES, model_tokenizer, naming, special_tokens

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
    """Read the tokenizer, without padding and truncation that training may have left in it.

    Tokens that the model does not have, of which there are `vocab_size`, are left out. Where
    tokenizer_config.json says whether texts begin with a token, they do as it says.

    Raises `CheckpointError` when it is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not files.has(path):
        raise CheckpointError(f"{path} is missing")
    says = read_json_if_there(folder / "tokenizer_config.json", files).get("add_bos_token")
    bos = special_tokens(folder, files).get("bos_token")
    with naming(path):
        tokenizer = Tokenizer.from_str(model_tokenizer(folder, vocab_size, files))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if isinstance(says, bool) and bos is not None and tokenizer.token_to_id(bos) is not None:
            _begin_texts(tokenizer, bos, says)
    return tokenizer


def _begin_texts(tokenizer: Tokenizer, bos: str, is_wanted: bool) -> None:
    """Let texts begin with `bos`, or not; what else the tokenizer puts around them stays."""
    text = tokenizer.encode("a b", add_special_tokens=False).tokens
    whole = tokenizer.encode("a b").tokens
    starts = (at for at in range(len(whole)) if whole[at : at + len(text)] == text)
    start = next(starts, None)
    if start is None or (whole[:1] == [bos] and start > 0) == is_wanted:
        return
    before = [bos, *whole[:start]] if is_wanted else whole[1:start]
    after = whole[start + len(text) :]
    # A template has names for tokens: in their texts a colon or a dollar sign would mean something.
    names = {token: f"t{at}" for at, token in enumerate(dict.fromkeys(before + after))}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(names[one] for one in before), "$A", *(names[one] for one in after)],
        special_tokens=[
            {"id": name, "ids": [tokenizer.token_to_id(token)], "tokens": [token]}
            for token, name in names.items()
        ],
    )


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
    for name, file in zip((DEFAULT, TOOL_USE), TEMPLATE_FILES, strict=True):
        if files.has(folder / file):
            templates[name] = _read_text(folder / file, files)
    if templates and DEFAULT not in templates:
        templates[DEFAULT] = templates[TOOL_USE]
    return templates


def _read_text(path: Path, files: KeptFiles) -> str:
    try:
        return (files.read(path) or b"").decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
