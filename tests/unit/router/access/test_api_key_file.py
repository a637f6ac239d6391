"""The file of API keys: what is written, what is refused, and who may write at once."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from router.access.api_keys import (
    MAX_KEYS,
    ApiKey,
    add_api_key,
    hash_api_key,
    load_api_keys,
    revoke_api_key,
)

GOOD = {"name": "alice", "sha256": "ab" * 32}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api_keys.json"


def write(path: Path, document: Any) -> None:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    path.chmod(0o600)


def test_a_new_key_is_in_a_private_file_as_its_hash_alone(path: Path) -> None:
    key = add_api_key(path, "alice", is_admin=True, requests_per_minute=60, max_concurrent=4)
    assert re.fullmatch(r"pds_[A-Za-z0-9_-]{43}", key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    assert load_api_keys(path) == (
        ApiKey(
            name="alice",
            sha256=hash_api_key(key.encode()),
            is_admin=True,
            requests_per_minute=60,
            max_concurrent=4,
        ),
    )


def test_keys_differ_and_keep_their_order(path: Path) -> None:
    keys = [add_api_key(path, name) for name in ("b", "a", "c@example.org")]
    assert len(set(keys)) == 3
    assert [key.name for key in load_api_keys(path)] == ["b", "a", "c@example.org"]
    revoke_api_key(path, "a")
    assert [key.name for key in load_api_keys(path)] == ["b", "c@example.org"]
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208 - no temporary file is left


def test_a_changed_file_keeps_its_mode(path: Path) -> None:
    add_api_key(path, "alice")
    path.chmod(0o640)
    add_api_key(path, "bob")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": "a b"}, "name is 'a b'"),
        ({"name": "-a"}, "name is '-a'"),
        ({"name": "x" * 65}, "name is"),
        ({"name": "a", "requests_per_minute": -1}, "requests_per_minute is -1: wanted 0 (no limit"),
        ({"name": "a", "max_concurrent": 10**7}, "max_concurrent is 10000000"),
    ],
)
def test_bad_wishes_change_nothing(path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        add_api_key(path, **fields)
    assert not path.exists()


def test_names_are_unique_and_must_be_there(path: Path) -> None:
    key = add_api_key(path, "alice")
    with pytest.raises(ConfigError, match="already"):
        add_api_key(path, "alice")
    with pytest.raises(ConfigError, match="no key named 'bob'"):
        revoke_api_key(path, "bob")
    (left,) = load_api_keys(path)
    assert left.sha256 == hash_api_key(key.encode())


def test_there_are_only_so_many(path: Path) -> None:
    keys = [{"name": f"k{i}", "sha256": f"{i:064x}"} for i in range(MAX_KEYS)]
    write(path, {"keys": keys})
    assert len(load_api_keys(path)) == MAX_KEYS
    with pytest.raises(ConfigError, match="1000 keys"):
        add_api_key(path, "one-more")
    write(path, {"keys": [*keys, {"name": "one-more", "sha256": "f" * 64}]})
    with pytest.raises(ConfigError, match="at most 1000"):
        load_api_keys(path)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "wanted an object"),
        ({"keys": {}}, "a list `keys`"),
        ({}, "a list `keys`"),
        ({"keys": [1]}, "key 1 is not an object"),
        ({"keys": [GOOD, {"name": "bob"}]}, "key 2 ('bob') has no sha256"),
        ({"keys": [{"sha256": "ab" * 32}]}, "key 1 (None) has no name"),
        ({"keys": [{**GOOD, "sha256": "AB" * 32}]}, "key 1 ('alice'): sha256 is 'ABAB"),
        ({"keys": [{**GOOD, "sha256": "ab"}]}, "wanted 64 lowercase hex digits"),
        ({"keys": [{**GOOD, "name": 7}]}, "key 1 (7): name is 7"),
        ({"keys": [{**GOOD, "is_admin": 1}]}, "is_admin is 1: wanted true or false"),
        ({"keys": [{**GOOD, "max_concurrent": True}]}, "max_concurrent is True"),
        ({"keys": [{**GOOD, "max_concurrent": 1.5}]}, "max_concurrent is 1.5"),
        ({"keys": [{**GOOD, "requests_per_minute": "9"}]}, "requests_per_minute is '9'"),
        ({"keys": [{**GOOD, "key": "pds_x"}]}, "a field 'key', which is unknown"),
        ({"keys": [GOOD, {**GOOD, "name": "b"}]}, "key 2 ('b') repeats another's sha256"),
        ({"keys": [GOOD, {**GOOD, "sha256": "cd" * 32}]}, "key 2 ('alice') repeats another's name"),
    ],
)
def test_a_broken_file_is_refused_in_words(path: Path, document: Any, said: str) -> None:
    write(path, document)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load_api_keys(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_a_file_that_others_may_change_is_refused(path: Path) -> None:
    add_api_key(path, "alice")
    path.chmod(0o660)
    with pytest.raises(ConfigError, match="mode 660"):
        load_api_keys(path)


def test_what_is_no_file_is_refused_at_once(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_api_keys(path)
    with pytest.raises(ConfigError, match="not a file"):
        load_api_keys(path.parent)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a file"):
        load_api_keys(path)
    with pytest.raises(ConfigError, match="No such file"):
        add_api_key(path.parent / "nowhere" / "keys.json", "alice")


def test_a_large_file_is_not_read(path: Path) -> None:
    write(path, {"keys": [], "padding": "x" * (1 << 20)})
    with pytest.raises(ConfigError, match="at most 1 MiB"):
        load_api_keys(path)


def test_writers_at_once_lose_nothing(path: Path) -> None:
    names = [f"k{i}" for i in range(24)]
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda name: add_api_key(path, name), names))
    assert sorted(key.name for key in load_api_keys(path)) == sorted(names)
