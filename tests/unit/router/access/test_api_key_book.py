"""The keys that hold now: they follow the file, and a broken one changes nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from router.access.api_key_book import CHECK_EVERY_S, ApiKeyBook
from router.access.api_keys import add_api_key, hash_api_key, revoke_api_key
from router.access.key_limits import Limit, Refusal
from tests.support.clocks.manual_clock import ManualClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api_keys.json"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_without_keys_it_is_open_and_with_any_it_is_not(path: Path, clock: ManualClock) -> None:
    assert ApiKeyBook(clock).is_open
    assert not ApiKeyBook(clock, api_key="x").is_open
    path.write_text('{"keys": []}')
    path.chmod(0o600)
    book = ApiKeyBook(clock, path=path)
    assert not book.is_open
    assert book.find(b"") is None


def test_an_open_api_trusts_nobody_without_an_administrators_key(
    path: Path, clock: ManualClock
) -> None:
    client, admin = add_api_key(path, "c"), add_api_key(path, "a", is_admin=True)
    book = ApiKeyBook(clock, path=path, open_api=True)
    assert book.is_open
    found = [book.key_when_open(key.encode()) for key in ("", "x", client, admin)]
    assert [(key.name, key.is_admin) for key in found] == [
        ("", False),
        ("", False),
        ("c", False),
        ("a", True),
    ]
    hashes = [hash_api_key(key.encode()) for key in (client, admin)]
    assert [key.sha256 for key in found] == ["", "", *hashes]
    assert ApiKeyBook(clock).key_when_open(b"").is_admin
    assert not ApiKeyBook(clock, api_key="x").key_when_open(b"").is_admin


def test_the_one_key_of_the_command_line_is_an_admin_s(clock: ManualClock) -> None:
    used = ApiKeyBook(clock, api_key="k€y").find("k€y".encode())
    assert used is not None
    assert (used.key.name, used.key.is_admin) == ("--api-key", True)


def test_it_starts_only_with_a_good_file(path: Path, clock: ManualClock) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeyBook(clock, path=path)


def test_a_revoked_key_stops_working_within_a_second(path: Path, clock: ManualClock) -> None:
    alice, bob = (add_api_key(path, name).encode() for name in ("alice", "bob"))
    book = ApiKeyBook(clock, path=path)
    revoke_api_key(path, "alice")
    carol = add_api_key(path, "carol", is_admin=True).encode()
    assert book.find(alice) is not None
    assert book.find(carol) is None

    clock.advance(CHECK_EVERY_S)
    assert book.find(alice) is None
    used = book.find(carol)
    assert used is not None
    assert used.key.is_admin
    assert book.find(bob) is not None


def test_the_file_is_looked_at_once_a_second_at_most(
    path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_api_key(path, "alice")
    book = ApiKeyBook(clock, path=path)
    looks = []
    plain_stat = Path.stat

    def counting_stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        looks.append(self)
        return plain_stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", counting_stat)
    for _ in range(1000):
        clock.advance(CHECK_EVERY_S / 100)
        book.find(b"x")
    assert 9 <= len(looks) <= 10


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_broken_file_keeps_the_old_keys_and_is_said_once(
    path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture, is_gone: bool
) -> None:
    key = add_api_key(path, "alice").encode()
    book = ApiKeyBook(clock, path=path)
    if is_gone:
        path.unlink()
    else:
        path.write_text('{"keys": [{"name": "mallory"}]}')
    caplog.set_level(logging.INFO)
    for _ in range(5):
        clock.advance(CHECK_EVERY_S)
        assert book.find(key) is not None
    (said,) = caplog.messages
    assert "the API keys stay unchanged" in said
    assert "No such file" in said if is_gone else "key 1 ('mallory') has no sha256" in said

    path.unlink(missing_ok=True)
    new = add_api_key(path, "bob").encode()
    clock.advance(CHECK_EVERY_S)
    assert book.find(key) is None
    assert book.find(new) is not None


def test_a_revoked_key_is_refused_as_soon_as_the_mode_of_the_file_is_corrected(
    path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """An editor may write another file in its place, with the mode of the umask."""
    key = add_api_key(path, "alice").encode()
    book = ApiKeyBook(clock, path=path)
    path.write_text('{"keys": []}')
    path.chmod(0o664)
    for _ in range(3):
        clock.advance(CHECK_EVERY_S)
        assert book.find(key) is not None
    (said,) = caplog.messages
    assert "the API keys stay unchanged" in said
    path.chmod(0o600)
    clock.advance(CHECK_EVERY_S)
    assert book.find(key) is None


def test_what_a_key_used_outlives_a_reload(path: Path, clock: ManualClock) -> None:
    key = add_api_key(path, "alice", requests_per_minute=2, max_concurrent=2).encode()
    book = ApiKeyBook(clock, path=path)
    used = book.find(key)
    assert used is not None
    assert book.take(used) is None
    assert book.take(used) is None
    add_api_key(path, "bob")
    clock.advance(CHECK_EVERY_S)
    same = book.find(key)
    assert same is used
    assert book.take(used) == Refusal(Limit.CONCURRENCY, 1)
    used.limits.release()
    assert book.take(used) == Refusal(Limit.RATE, 29)


def test_a_revoked_key_is_forgotten_and_what_it_runs_ends_in_order(
    path: Path, clock: ManualClock
) -> None:
    key = add_api_key(path, "alice", max_concurrent=1).encode()
    book = ApiKeyBook(clock, path=path)
    used = book.find(key)
    assert used is not None
    assert book.take(used) is None
    revoke_api_key(path, "alice")
    clock.advance(CHECK_EVERY_S)
    assert book.find(key) is None
    assert book.in_use() == ()
    used.limits.release()
    assert used.limits.num_running == 0


def test_the_metrics_token(clock: ManualClock) -> None:
    book = ApiKeyBook(clock, api_key="x", metrics_token="prometheus")
    assert book.is_metrics_token(b"prometheus")
    assert not book.is_metrics_token(b"x")
    assert not ApiKeyBook(clock, api_key="x").is_metrics_token(b"")
