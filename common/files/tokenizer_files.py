"""What routers and nodes must both know of a tokenizer's files: its tokens, and which of them end.

Both read the same folder, so that they stop at the same tokens and compile the same grammars.
Checkpoints say what a special token is in several files, which need not agree. As in transformers,
what any of them declares is a token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files.kept_files import KeptFiles

MAX_PLAIN_CHARS = 8
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What is read here of a folder; all but the first may be missing."""
TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
"""Files of chat templates: of any chat, and of one with tools."""
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|eot|>",
)
"""Special tokens with which families of models end a turn, and nothing else."""
_TURN_OR_PART_END = "<|end|>"
_ENDS_BEHIND_PARTS = frozenset({"<|return|>", "<|flush|>"})
"""The ends of turns of several parts, such as the reasoning and the answer in Harmony. `<|end|>` is
behind each part there."""
_CHANNEL = "<|channel|>"
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""The ends of answers in Harmony, whose headers have `_CHANNEL`: after a text, and after a call."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_ENDS_OF_TEXTS = ("bos_token", "eos_token")
_MOST_DIGITS = 9
"""The digits of a token's number; a longer one is of no token."""
_BROKEN = (AttributeError, LookupError, TypeError, ValueError)
"""What reading raises where a value has another type than it should."""
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise what a library raises that reads a tokenizer as a `CheckpointError` about `path`.

    The libraries are written in Rust, whose panics are no `Exception`.
    """
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def special_tokens(folder: Path, files: KeptFiles) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token` and the like, by these names.

    Those of special_tokens_map.json count where tokenizer_config.json has none, or declares no
    tokens, as older ones do not. Raises `CheckpointError` for a file that is no JSON.
    """
    config = _read_if_there(folder / "tokenizer_config.json", files)
    older = _read_if_there(folder / "special_tokens_map.json", files)
    sources = (older, config) if "added_tokens_decoder" in config else (config, older)
    return {
        name: text
        for source in sources
        for name, value in source.items()
        if name.endswith("_token") and (text := _text(value)) is not None
    }


def tokenizer_end_ids(folder: Path, files: KeptFiles | None = None) -> frozenset[int]:
    """Return the ends that the tokenizer's files name, beside those of the model's files.

    Fine-tunes often change the end token there alone. Others, as Llama 3 when it came out, name the
    end of a text everywhere, and answer with turns, which end as the chat template writes them.
    Raises `CheckpointError` for a file that is broken.
    """
    files = KeptFiles() if files is None else files
    end = special_tokens(folder, files).get("eos_token")
    template = _template_text(folder, files)
    turn_ends = {text for text in (*_TURN_ENDS, _TURN_OR_PART_END) if text in template}
    if _CHANNEL in template:
        turn_ends.update(_HARMONY_ENDS)
    if not files.has(folder / "tokenizer.json") or not (turn_ends or end):
        return frozenset()
    layout, _ = _completed(folder, files)
    special = {one["content"]: one["id"] for one in layout["added_tokens"] if one.get("special")}
    if _ENDS_BEHIND_PARTS & special.keys():
        turn_ends.discard(_TURN_OR_PART_END)
    ends = {special[text] for text in turn_ends & special.keys()}
    known = _vocabulary(layout) | {one["content"]: one["id"] for one in layout["added_tokens"]}
    return frozenset(ends | ({known[end]} if end in known else set()))


def model_tokenizer(folder: Path, vocab_size: int, files: KeptFiles) -> str:
    """Return the tokenizer of a folder, as JSON, for a model of `vocab_size` tokens.

    It is tokenizer.json with the tokens that the other files declare, and without those that the
    model lacks: what such a token spelled is spelled with other ones. It is the same text where
    nothing differs. Raises `CheckpointError` for a file that is broken.
    """
    path = folder / "tokenizer.json"
    layout, is_completed = _completed(folder, files)
    try:
        if _cut(layout, vocab_size) or is_completed:
            return json.dumps(layout, ensure_ascii=False)
        return (files.read(path) or b"").decode()
    except _BROKEN as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


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


def _cut(layout: dict[str, Any], vocab_size: int) -> bool:
    """Take the tokens that a model of `vocab_size` tokens lacks out of a tokenizer.

    Returns whether there were any.
    """
    model = layout["model"]
    vocab, added = model.get("vocab") or {}, layout["added_tokens"]
    if isinstance(vocab, dict):
        kept: Any = {token: at for token, at in vocab.items() if at < vocab_size}
    else:
        kept = vocab[:vocab_size]
    kept_added = [one for one in added if one["id"] < vocab_size]
    if len(kept) == len(vocab) and len(kept_added) == len(added):
        return False
    model["vocab"], layout["added_tokens"] = kept, kept_added
    if model.get("merges"):
        gone = vocab.keys() - kept.keys()
        model["merges"] = [one for one in model["merges"] if not _spells(one, gone)]
    return True


def _spells(merge: Any, tokens: set[str]) -> bool:
    """Return whether a merge joins, or makes, one of some tokens."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return not tokens.isdisjoint((left, right, left + right))


def _completed(folder: Path, files: KeptFiles) -> tuple[dict[str, Any], bool]:
    """Return tokenizer.json with what the other files declare, and whether that is more."""
    path = folder / "tokenizer.json"
    layout = _read(path, files)
    declared = _declared(folder, files)
    try:
        layout["added_tokens"] = layout.get("added_tokens") or []
        return layout, _add(declared, layout)
    except _BROKEN as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def _add(declared: Mapping[str, _Declared], layout: dict[str, Any]) -> bool:
    """Add what is declared to the added tokens of a tokenizer; return whether it lacked any.

    A tokenizer cuts the text of any other token into pieces, also where a chat template has it.
    """
    added = layout["added_tokens"]
    by_text = {one["content"]: one for one in added}
    vocab = _vocabulary(layout)
    taken = {*vocab.values(), *(one["id"] for one in added)}
    new = []
    is_more = False
    for text, one in declared.items():
        if text in by_text:
            if one.looks["special"] and not by_text[text].get("special"):
                by_text[text]["special"] = is_more = True
        elif text in vocab or (one.token_id is not None and one.token_id not in taken):
            new.append({"id": vocab.get(text, one.token_id), "content": text, **one.looks})
    table = (layout.get("model") or {}).get("vocab")
    if not isinstance(table, dict):
        new = [one for one in new if one["content"] in vocab]
    if new:
        layout["added_tokens"] = sorted([*added, *new], key=lambda one: int(one["id"]))
    if new and isinstance(table, dict):
        # The library gives added tokens that the vocabulary lacks other numbers.
        table.update((one["content"], one["id"]) for one in layout["added_tokens"])
    return is_more or bool(new)


@dataclass(frozen=True, slots=True)
class _Declared:
    """A token that a file beside tokenizer.json declares; `looks` is how text is read for it."""

    token_id: int | None
    looks: Mapping[str, bool]


def _declared(folder: Path, files: KeptFiles) -> dict[str, _Declared]:
    """Return the tokens that the files beside tokenizer.json declare, by text."""
    config = _read_if_there(folder / "tokenizer_config.json", files)
    special = _named_as_special(folder, files)
    # What may be a word, or white space, is one of a prompt too.
    found = {
        text: _Declared(None, {**_PLAIN, "special": True})
        for text in special
        if len(text) > 1 and not text.isalnum() and not text.isspace()
    }
    by_text = _read_if_there(folder / "added_tokens.json", files)
    # By number: of two texts that have one, that of the newer file counts.
    listed: dict[str, Any] = {str(at): text for text, at in by_text.items()}
    listed |= {str(at): one for at, one in _items(config, "added_tokens_decoder")}
    for at, one in listed.items():
        text = _text(one)
        if text and at.isdecimal() and len(at) <= _MOST_DIGITS:
            says = one if isinstance(one, dict) else {}
            looks = {name: says.get(name) is True for name in _PLAIN}
            is_special = text in special or says.get("special") is True
            found[text] = _Declared(int(at), {**looks, "special": is_special})
    return found


def _named_as_special(folder: Path, files: KeptFiles) -> dict[str, None]:
    """Return the texts of tokens that begin or end texts or turns, as far as they are named."""
    roles = special_tokens(folder, files)
    named = [text for role in _ENDS_OF_TEXTS if (text := roles.get(role))]
    config = _read_if_there(folder / "tokenizer_config.json", files)
    sources = [config]
    if "added_tokens_decoder" not in config:
        sources.append(_read_if_there(folder / "special_tokens_map.json", files))
    for source in sources:
        for key in _LISTS:
            named += [text for _, one in _items(source, key) if (text := _text(one))]
    return dict.fromkeys(named)


def _items(source: Mapping[str, Any], key: str) -> Iterable[tuple[Any, Any]]:
    """Return what a list or an object has, each with its place or its name; else nothing."""
    value = source.get(key)
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def _template_text(folder: Path, files: KeptFiles) -> str:
    """Return the chat templates of a folder as they are written, one after the other."""
    named = _read_if_there(folder / "tokenizer_config.json", files).get("chat_template")
    texts = [json.dumps(named, ensure_ascii=False)]
    for name in TEMPLATE_FILES:
        path = folder / name
        try:
            texts.append((files.read(path) or b"").decode(errors="replace"))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return "".join(texts)


def _vocabulary(layout: Mapping[str, Any]) -> dict[str, int]:
    vocab = (layout.get("model") or {}).get("vocab") or {}
    return vocab if isinstance(vocab, dict) else {one[0]: at for at, one in enumerate(vocab)}


def _text(token: Any) -> str | None:
    """Return the text of a token, which files have as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_if_there(path: Path, files: KeptFiles) -> dict[str, Any]:
    return _read(path, files) if files.has(path) else {}


def _read(path: Path, files: KeptFiles) -> dict[str, Any]:
    try:
        value = json.loads(files.read(path) or b"")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}: wanted a JSON object")
    return value
