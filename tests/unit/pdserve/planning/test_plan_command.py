"""`pdserve plan`: one small plan from flags to output, and nonsense in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.measured_profile import encode_profile, read_measured_profile
from pdserve.cli import main
from simulator.profile import FOLDER
from tests.unit.pdserve.planning.router_logs import log_line, written

SMALL = ("--rate", "4", "--lengths", "200-400:5-15", "--requests", "20", "--seeds", "2")
TARGETS = ("--ttft", "1000", "--tpot", "40")


def said_by(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def other_profile(tmp_path: Path, name: str) -> Path:
    """A measured profile of a model with this name."""
    measured = read_measured_profile(FOLDER / "8b_h100.json")
    model = replace(measured.model, name=name)
    path = tmp_path / "profile.json"
    path.write_text(encode_profile(replace(measured, model=model, source="measured")))
    return path


def test_a_plan_says_what_was_found_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    code, out, err = said_by(capsys, [*SMALL, *TARGETS, "--nodes", "2", "--page", str(page),
                                      "--explain", "3"])  # fmt: skip
    assert code == 0
    assert "meets the targets: 100 % of the requests are within both targets" in out
    assert "(90 % interval over 2 seeds: 100 to 100 %)" in out
    assert re.search(r"^1P \+ 1D +100 % ", out, re.M)
    assert re.search(r"^2 mixed +100 % ", out, re.M)
    assert "1 node would do." in out
    assert "Note: The profile is no measurement." in out
    story = out[out.index("Request 3 on ") :]
    assert "placed by " in story
    assert "token 0 of " in story
    assert re.search(r"TTFT [\d.]+ ms, TPOT [\d.]+ ms: within both targets", story)
    assert "plan: " in err
    assert "trial " in err
    text = page.read_text()
    assert text.count("<svg") == 3
    assert not re.search(r"src=|href=|https?://|<script", text)


def test_an_answer_is_not_lost_with_a_page_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = said_by(capsys, [*SMALL, *TARGETS, "--nodes", "1", "--page", "/dev/full"])
    assert code == 2
    assert "meets the targets" in out
    assert err.endswith("pdserve: /dev/full cannot be written: No space left on device\n")


def test_a_plan_as_json_is_one_object_and_finds_the_number_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = said_by(capsys, [*SMALL, *TARGETS, "--json"])
    found = json.loads(out)
    assert code == 0
    assert found["meets"] is True
    assert found["nodes"] == {"prefill": 0, "decode": 0, "mixed": 1}
    assert found["needed_nodes"] == 1
    assert found["split"] is None
    assert found["mixed"]["interval"] == [1.0, 1.0]
    assert found["mixed"]["ttft_s"]["p50"] > 0
    assert found["requests_in_trial"] == 20
    again = json.loads(said_by(capsys, [*SMALL, *TARGETS, "--json"])[1])
    assert again == found, "one seed, one answer"


@pytest.mark.parametrize(
    ("targets", "percent"), [(("--ttft", "5", "--tpot", "40"), 90), (("--ttft", "1000", "--tpot",
    "2", "--attain", "0.99"), 99)],
)  # fmt: skip
def test_targets_that_nobody_meets_are_answered_with_the_best_there_is(
    targets: Sequence[str], percent: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said_by(capsys, [*SMALL, *targets])
    assert (code, out) == (1, "")
    said = err.splitlines()[-1]
    best = re.search(
        rf"{percent} % are within (\d+) ms and ([\d.]+) ms, and that is the best", said
    )
    assert best is not None
    assert "no number of nodes meets" in said
    assert 10 < int(best[1]) < 100
    assert 7 < float(best[2]) < 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TARGETS], "the load is wanted as --trace FILE, or as --rate with --lengths"),
        ([*TARGETS, *SMALL, "--trace", "x.csv"], "the load is wanted as --trace FILE, or as"),
        ([*TARGETS, "--rate", "3"], "--lengths is missing: wanted --rate R with --lengths"),
        ([*TARGETS, "--lengths", "5:5"], "--rate is missing"),
        ([*TARGETS, "--rate", "0", "--lengths", "5:5"], "--rate is '0': wanted requests per sec"),
        ([*TARGETS, "--rate", "nan", "--lengths", "5:5"], "--rate is 'nan': wanted"),
        ([*TARGETS, "--rate", "3", "--lengths", "5"], "--lengths is '5': wanted PROMPT:OUTPUT"),
        ([*TARGETS, "--rate", "3", "--lengths", "200000:5"], "they reach 200005 tokens in all"),
        ([*TARGETS, "--trace", "none.csv"], "none.csv cannot be read: No such file"),
        ([*SMALL, "--ttft", "x", "--tpot", "1"], "--ttft is 'x': wanted milliseconds above 0"),
        ([*SMALL, "--ttft", "inf", "--tpot", "1"], "--ttft is 'inf': wanted milliseconds"),
        ([*SMALL, "--ttft", "1", "--tpot", "-1"], "--tpot is '-1': wanted milliseconds above 0"),
        ([*SMALL, "--ttft", "1"], "the following arguments are required: --tpot"),
        ([*SMALL, *TARGETS, "--attain", "90"], "--attain is '90': wanted a share from 0.5"),
        ([*SMALL, *TARGETS, "--nodes", "0"], "--nodes is '0': wanted a number from 1 to 512"),
        ([*SMALL, *TARGETS, "--at-once", "0"], "--at-once is '0': wanted a number from 1"),
        ([*SMALL, *TARGETS, "--nodes", "0000000019999"], "--nodes is '0000000019999': wan"),
        ([*SMALL, *TARGETS, "--seeds", "1.5"], "--seeds is '1.5': wanted a number from 1 to 30"),
        ([*SMALL, *TARGETS, "--requests", "3"], "--requests is '3': wanted a number from 20"),
        ([*SMALL, *TARGETS, "--explain", "21"], "--explain is '21': wanted the number of a req"),
        ([*SMALL, *TARGETS, "--explain", "9" * 5000], "--explain is '99"),
        ([*SMALL, *TARGETS, "--page", "no/such/page.html"], "wanted a file in a folder that exis"),
        ([*SMALL, *TARGETS, "--profile", "9b_h100"], "wanted a file of `pdserve profile`, or 70b"),
        ([*SMALL, *TARGETS, "--profile", "none.json"], "none.json: No such file"),
        ([*SMALL, *TARGETS, "--max-num-seqs", "0"], "max_num_seqs is 0"),
        ([*SMALL, *TARGETS, "--max-num-seq", "1"], "unknown flag --max-num-seq"),
        ([*SMALL, *TARGETS, "--model", "./m"], "--model is './m', and neither the load nor the"),
        ([*SMALL, *TARGETS, "--swap-space", "1GiB"], "--swap-space changes nothing in `pdserve"),
        ([*SMALL, *TARGETS, "--role=decode"], "--role changes nothing in `pdserve plan`"),
        ([*SMALL, *TARGETS, "--auto-roles"], "--auto-roles changes nothing in `pdserve plan`"),
    ],
)
def test_nonsense_gets_one_sentence_before_anything_is_tried(
    arguments: Sequence[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = said_by(capsys, arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_profile_of_another_model_than_that_of_the_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path, *(log_line(duration_ms=1e3 * n) for n in range(1, 5)))
    profile = str(other_profile(tmp_path, "qwen"))
    flags = ["--trace", str(log), *TARGETS, "--profile", profile]
    code, _, err = said_by(capsys, flags)
    assert code == 2
    assert "is of the model qwen, and the requests of" in err
    assert "are for llama: wanted a profile of that model" in err
    code, _, err = said_by(capsys, [*SMALL, *TARGETS, "--profile", profile, "--model", "llama"])
    assert code == 2
    assert "is of the model qwen: wanted llama" in err


def test_an_empty_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text("")
    code, _, err = said_by(capsys, [*SMALL, *TARGETS, "--profile", str(path)])
    assert code == 2
    assert "profile.json: no JSON" in err
