"""The program that compares and measures a cluster on one card, run on this machine's CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.local_cluster.child_process import ending_with_parent

ON_CPU = (
    sys.executable,
    "-m",
    "tests.gpu.cluster_on_card",
    "--backend",
    "numba",
    "--shape",
    "tiny",
)
ON_CARDS = (
    sys.executable, "-m", "tests.gpu_kernels.played_cluster",
    "alone", "loaded", "killed", "lost",
)  # fmt: skip


def test_all_phases_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    limits = ("--start-s", "200", "--total-s", "280")
    done = subprocess.run(
        [*ON_CPU, *limits, "--out", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "11 passed, 0 failed"
    found = json.loads(out.read_text())
    assert found["failed"] == []
    assert found["alone"] == {"answers": 4, "tokens": 4 * 96}
    assert found["killed"]["moved"] >= 1
    assert set(found["first"]) == {
        f"{one} {n}{token}"
        for one in ("apart", "mixed") for n in (100, 300)
        for token in ("", ", second token", ", exposed")
        if one == "apart" or not token.endswith("exposed")
    }  # fmt: skip
    exposed = found["first"]["apart 300, exposed"]
    assert exposed["handoffs"] == 5
    assert exposed["mean"] > 0
    assert exposed["share of first token"] > 0
    # A second token may come in one piece with the first one.
    assert all(
        one["least"] >= 0 if name.endswith("token") else one["least"] > 0
        for name, one in found["first"].items()
        if not name.endswith("exposed")
    )
    assert set(found["tokens"]) == {f"{one} {n}" for one in ("apart", "mixed") for n in (1, 4)}
    assert len(found["up"]["first token after, s"]) == 2
    assert list(tmp_path.iterdir()) == [out]


def test_nodes_that_do_not_start_end_their_phases_only(tmp_path: Path) -> None:
    command = [*ON_CPU, "alone", "first", "--node-flags", "--max-model-len 32000"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "found.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "1 passed, 2 failed: start, start"
    assert [line.partition(" (")[0] for line in lines if line.startswith("== ")] == [
        *["== start: FAILED"] * 2,
        "== left: ok",
    ]
    assert "max_model_len is 32000: wanted at most 4096" in done.stdout
    logs = (tmp_path / "cluster_logs.txt").read_text()
    assert logs.count("max_model_len is 32000") >= 4
    assert json.loads((tmp_path / "found.json").read_text())["failed"] == ["start", "start"]


def test_one_that_is_terminated_closes_everything_and_says_what_it_found(tmp_path: Path) -> None:
    command = [*ON_CPU, "alone", "first", "--start-s", "200", "--total-s", "280"]
    command += ["--out", str(tmp_path / "found.json")]
    with subprocess.Popen(
        ending_with_parent(command), stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        started = program.stdout.readline()
        program.terminate()
        lines = program.stdout.read().splitlines()
    assert started.startswith("== start: ok"), [started, *lines]
    ends = [line.replace(":", "").split()[1:3] for line in lines if line.startswith("== ")]
    assert ends == [["alone", "FAILED"], ["stop", "ok"], ["start", "FAILED"], ["left", "ok"]]
    assert json.loads(lines[-2])["backend"] == "numba"
    assert lines[-1] == "3 passed, 2 failed: alone, start"
    assert program.returncode == 2


@pytest.mark.timeout(600)
def test_answers_on_played_cards(tmp_path: Path) -> None:
    """Where nodes compute with the GPU's kernels, in Triton's interpreter, and one loses its card.

    Figures and the start of `pdserve up` are taken on a CPU, above.
    """
    out = tmp_path / "found.json"
    limits = ("--start-s", "300", "--total-s", "560")
    done = subprocess.run(
        [*ON_CARDS, *limits, "--out", out],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "7 passed, 0 failed"
    found = json.loads(out.read_text())
    assert found["failed"] == []
    assert found["backend"] == "triton"
    assert found["loaded"] == {"at a time": 4}
    assert found["lost"]["exit code"]
    assert found["lost"]["moved"] >= 1
