"""`pdserve simulate`: flags, what it prints, and what it says of nonsense."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.version import VERSION
from pdserve.cli import main
from pdserve.configuration.config_sources import SettingsError
from pdserve.simulating.simulate_command import lines_of, run_simulation, simulation_of
from simulator.faults.history import History, read_history
from simulator.faults.kinds import FaultKind
from simulator.faults.search import history_of
from tests.support.clocks.manual_clock import ManualClock
from tests.support.cluster.processes import SOURCES
from tests.support.nodes.node_views import placing
from tests.support.nodes.recorded_placing import RecordedPlacing


def wrong_with_two(history: History) -> str:
    """Play a cluster in which two requests together are wrong."""
    names = {asked.name for asked in history.requests}
    return "Violation: r1 ended twice" if {"r1", "r5"} <= names else ""


def test_the_help_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    words = set(re.findall(r"[a-z]+", capsys.readouterr().out.split("--faults KINDS")[-1]))
    assert {kind.value for kind in FaultKind} <= words


def test_nothing_is_called_right_that_is_not_checked() -> None:
    """Without assertions the books of a node could be wrong in every history."""
    command = [sys.executable, "-O", "-m", "pdserve", "simulate", "--histories", "1"]
    ended = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "PYTHONOPTIMIZE" in ended.stderr


def test_flags_become_wishes() -> None:
    wanted = simulation_of(
        {
            "seed": "7",
            "histories": "3",
            "requests": "11",
            "nodes": "2:3",
            "faults": "crash,store,crash",
            "json": True,
        }
    )
    assert (wanted.seed, wanted.num_histories, wanted.is_json) == (7, 3, True)
    assert wanted.wishes.kinds == (FaultKind.CRASH, FaultKind.STORE)
    assert (wanted.wishes.num_requests, wanted.wishes.num_prefill) == (11, 2)
    assert wanted.wishes.num_decode == 3
    assert simulation_of({}).wishes.kinds == tuple(FaultKind)
    assert simulation_of({"faults": "none"}).wishes.kinds == ()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"seed": "-1"}, "--seed is '-1': wanted a whole number from 0"),
        ({"seed": "9" * 5000}, "--seed is '99"),
        ({"nodes": "1:" + "9" * 5000}, "--nodes is '1:99"),
        ({"histories": "0"}, "--histories is '0': wanted a whole number from 1"),
        ({"requests": "1001"}, "--requests is '1001'"),
        ({"processes": "0"}, "--processes is '0': wanted a whole number from 1"),
        ({"requests": "٣"}, "--requests"),
        ({"faults": "crush"}, "--faults is 'crush': wanted all, none, or some of crash, freeze"),
        ({"faults": ""}, "--faults is ''"),
        ({"nodes": "2"}, "--nodes is '2': wanted P:D"),
        ({"nodes": "1:0"}, "--nodes is '1:0': wanted P:D"),
        ({"nodes": "9:9"}, "16 nodes at most"),
        ({"output": "no/such/wrong.json"}, "--output is 'no/such/wrong.json': wanted a file in"),
        ({"output": "/"}, "--output is '/': wanted a file in a folder that exists"),
    ],
)
def test_nonsense_is_named(flags: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        simulation_of(flags)
    assert says in "; ".join(refused.value.problems)


def test_what_a_replay_would_ignore_is_refused_in_one_sentence() -> None:
    with pytest.raises(SettingsError) as refused:
        simulation_of({"replay": "x.json", "seed": "3", "histories": "5", "output": "y.json"})
    (problem,) = refused.value.problems
    assert problem.startswith("--replay runs what is in a file as it is: wanted no --seed, ")
    assert problem.endswith("--histories, --output")
    assert simulation_of({"replay": "x.json", "json": True}).replayed == Path("x.json")


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "x", "--nodes", "y"]) == 2
    said = capsys.readouterr().err
    assert "--seed" in said
    assert "--nodes" in said


def test_good_histories_end_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--histories", "2", "--requests", "3"]) == 0
    assert "2 histories, none is wrong" in capsys.readouterr().out


def test_a_wrong_history_is_shortened_written_and_replayed(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "wrong.json"
    wanted = simulation_of({"seed": "3", "processes": "1", "output": str(path)})
    assert not run_simulation(wanted, out, ManualClock(), wrong_with_two)
    said = out.getvalue()
    assert "seed 3, lane shm: Violation: r1 ended twice" in said
    assert f"run it again: pdserve simulate --replay {path}" in said
    history = read_history(path)
    assert {asked.name for asked in history.requests} == {"r1", "r5"}
    assert not history.faults
    out = io.StringIO()
    assert not run_simulation(simulation_of({"replay": str(path)}), out, None, wrong_with_two)
    assert "wrong: Violation: r1 ended twice" in out.getvalue()
    assert run_simulation(simulation_of({"replay": str(path)}), io.StringIO())


def test_json_is_one_object(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "wrong.json"
    wanted = simulation_of({"output": str(path), "processes": "1", "json": True})
    assert not run_simulation(wanted, out, ManualClock(), wrong_with_two)
    found: dict[str, Any] = json.loads(out.getvalue())
    assert found["wrong"] == "Violation: r1 ended twice"
    assert found["history"] == json.loads(path.read_text())
    out = io.StringIO()
    assert run_simulation(simulation_of({"histories": "4", "json": True}), out, None, lambda _: "")
    assert json.loads(out.getvalue()) == {"histories": 4, "wrong": ""}


def test_progress_is_told(tmp_path: Path) -> None:
    clock, out = ManualClock(), io.StringIO()

    def run(_: History) -> str:
        clock.advance(2.0)
        return ""

    assert run_simulation(simulation_of({"histories": "7"}), out, clock, run)
    assert "3 histories, none is wrong; 0.5 a second" in out.getvalue()


def test_a_file_that_cannot_be_written_is_named_and_the_history_is_not_lost(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    flags = {"output": str(folder / "wrong.json"), "processes": "1", "json": True}
    wanted = simulation_of(flags)
    folder.rmdir()
    out = io.StringIO()
    with pytest.raises(ConfigError, match=r"wrong\.json cannot be written: No such file"):
        run_simulation(wanted, out, ManualClock(), wrong_with_two)
    assert len(json.loads(out.getvalue())["history"]["requests"]) == 2
    assert main(["simulate", "--replay", str(tmp_path / "none.json")]) == 2


def test_a_history_is_told_in_the_order_of_time() -> None:
    history = history_of(1, simulation_of({}).wishes)
    lines = lines_of(history)
    assert len(lines) == 1 + len(history)
    assert lines[0].startswith("nodes: ")
    times = [float(line.split()[0]) for line in lines[1:]]
    assert times == sorted(times)


def test_a_recording_is_replayed_and_the_first_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = RecordedPlacing(tmp_path, placing("least_loaded"), num_nodes=6)
    played.run(60)
    assert main(["simulate", "--replay", str(played.path)]) == 0
    assert re.fullmatch(
        r"router-1: \d+ placements, and all are the same\n", capsys.readouterr().out
    )
    lines = played.path.read_text().splitlines()
    (number, *_) = [i for i, line in enumerate(lines, 1) if '"call":"choose"' in line]
    lines[number - 1] = lines[number - 1].replace("least_loaded: best", "least_loaded: worst")
    lines[0] = lines[0].replace(f'"version":"{VERSION}"', '"version":"0.0.9"')
    played.path.write_text("\n".join(lines) + "\n")
    assert main(["simulate", "--replay", str(played.path)]) == 1
    said = capsys.readouterr().out
    assert "recorded by version 0.0.9, replayed by version" in said
    assert "router-1: 1 placements until a decision differs\n" in said
    assert re.search(rf"  at \d+\.\d+ s, line {number} of .*: chooser\.choose\n", said)
    assert re.search(r"  recorded: .*worst of.*\n  replayed: .*best of", said)
    assert main(["simulate", "--replay", str(played.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["num_decisions"], found["difference"]["line"]) == (1, number)
