"""A secret's file may be used by its owner alone, and read by others where another user owns it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from common.files.secret_files import secret_file_problem

ME, ANOTHER = 10001, 0


def status(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 0, 10, 0, 0, 0))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_private_file_may_hold_a_secret(mode: int) -> None:
    assert secret_file_problem("key.pem", status(mode, ME), user_id=ME) == ""


@pytest.mark.parametrize("mode", [0o440, 0o444, 0o640, 0o604, 0o660, 0o601])
def test_a_file_of_mine_that_others_may_use_may_not(mode: int) -> None:
    problem = secret_file_problem("key.pem", status(mode, ME), user_id=ME)
    assert f"(mode {mode:03o}): wanted 600, `chmod 600 key.pem`" in problem


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o444, 0o640, 0o644])
def test_a_mounted_secret_of_another_user_may(mode: int) -> None:
    assert secret_file_problem("key.pem", status(mode, ANOTHER), user_id=ME) == ""


@pytest.mark.parametrize("mode", [0o460, 0o442, 0o666, 0o646, 0o620, 0o602, 0o441, 0o777])
def test_what_others_can_change_may_not(mode: int) -> None:
    problem = secret_file_problem("key.pem", status(mode, ANOTHER), user_id=ME)
    assert f"may be changed by others (mode {mode:03o}): wanted 440" in problem


def test_the_user_is_that_of_this_process(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.touch(0o640)
    path.chmod(0o640)
    assert "wanted 600" in secret_file_problem(path, path.stat())
