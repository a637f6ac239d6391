"""Amounts on a benchmark's command line: a sentence instead of a division by nothing."""

from __future__ import annotations

import sys

import pytest

from bench.amounts import above_0, at_least_1
from bench.serving import main


def test_amounts_are_read() -> None:
    assert (above_0("0.5"), at_least_1("7")) == (0.5, 7)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--rate-rps", value) for value in ("0", "-1", "nan", "inf", "x", "")),
        *(("--duration-s", value) for value in ("0", "nan")),
        *(
            (flag, value)
            for flag in ("--rounds", "--nodes", "--prompt-tokens", "--output-tokens")
            for value in ("0", "-1", "1.5", "x")
        ),
        ("--slo-ttft-ms", "0"),
        ("--slo-tpot-ms", "-5"),
    ],
)
def test_what_is_no_amount_is_refused_in_a_sentence(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.serving", f"{flag}={value}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"argument {flag}: {value!r}: wanted a " in capsys.readouterr().err
