"""`python -m bench.policies`: one JSON line last, pictures where matplotlib is, clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import policies
from bench.replay.rows import ROWS

EXCERPTS = Path(__file__).parents[3] / "bench" / "traces"
TRACE = str(EXCERPTS / "azure_code.csv")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["bench.policies", *arguments])
    policies.main()


def test_one_json_line_comes_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        monkeypatch,
        *("--trace", TRACE, "--requests", "12", "--pool-blocks", "200,400", "--loads", "1,2"),
        *("--seats", "8", "--budget", "512", "--json"),
    )
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    (trace,) = result["traces"].values()
    assert (trace["requests"], trace["pool_blocks"]) == (12, [200, 400])
    assert trace["speed_ups"]["2.0"] == pytest.approx(2 * trace["speed_ups"]["1.0"], rel=0.02)
    names = {row.name for row in ROWS}
    assert len(result["runs"]) == 4 * len(names)
    assert {r["row"] for r in result["runs"]} == names
    assert all(r["answered"] == 12 and r["overruns"] == 0 for r in result["runs"])
    assert result["overruns"] == 0
    assert {r["row"] for r in result["ranking"]} == names
    assert "| 400 blocks, load 2 " in out
    assert err.splitlines()[-1] == "36/36: azure_code, 400 blocks, load 2, oracle"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "missing.csv"], "missing.csv cannot be read"),
        (["--trace", TRACE, TRACE], "azure_code, azure_code: wanted different"),
        (["--trace", TRACE, "--requests", "0"], "--requests is 0: wanted at least 1"),
        (["--trace", TRACE, "--seats", "9", "--budget", "8"], "--budget is 8: wanted at least 9"),
        (["--trace", TRACE, "--loads", "-1"], "--loads is '-1': wanted different shares"),
        (["--trace", TRACE, "--loads", "1,x"], "--loads is '1,x'"),
        (["--trace", TRACE, "--loads", "1,1"], "--loads is '1,1'"),
        (["--trace", TRACE, "--pool-blocks", "100,x"], "--pool-blocks is '100,x'"),
        (["--trace", TRACE, "--pool-blocks", "100,100"], "wanted different numbers"),
        (["--trace", TRACE, "--cost", "tokens=1"], "cost 'tokens=1': wanted one of"),
        (["--trace", TRACE, "--set", "requeue"], "requeue is empty"),
        (["--trace", TRACE, "--set", "skip_ahead=1"], "'skip_ahead=1': wanted NAME=VALUE with one"),
        (["--trace", TRACE, "--set", "skip_ahead_window=x"], "'skip_ahead_window=x': .*'x'"),
        (["--trace", TRACE, "--set", "init_new_token_ratio=2"], "init_new_token_ratio is 2"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        run(monkeypatch, *arguments)


def test_scheduling_options_hold_for_all_replays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--trace", str(EXCERPTS / "azure_conv.csv"), "--requests", "20")
    pressed = (*arguments, "--pool-blocks", "50", "--loads", "6", "--json")
    recomputed = []
    for mode in ("recompute", "swap"):
        run(monkeypatch, *pressed, "--set", f"preemption_mode={mode}")
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["scheduling"]["preemption_mode"] == mode
        assert any(r["preemptions"] for r in result["runs"])
        recomputed.append(sum(r["recomputed_tokens"] for r in result["runs"]))
    assert recomputed[0] > 0 == recomputed[1]


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="--plot needs matplotlib"):
        run(monkeypatch, "--trace", TRACE, "--plot", str(tmp_path))


def test_pictures_are_the_same_bytes_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for name in ("once", "again"):
        run(
            monkeypatch,
            *("--trace", TRACE, "--requests", "8", "--pool-blocks", "200"),
            *("--plot", str(tmp_path / name)),
        )
        files = sorted((tmp_path / name).iterdir())
        assert [f.name for f in files] == ["course_azure_code.svg", "policies_azure_code.svg"]
        drawn.append([f.read_bytes() for f in files])
    assert drawn[0] == drawn[1]
    assert all(b"learned" in picture for picture in drawn[0])
    assert all(len(picture) < 200_000 for picture in drawn[0])
