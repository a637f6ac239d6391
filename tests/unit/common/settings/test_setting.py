"""What a declaration accepts, and what is said about it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from common.settings.setting import (
    POWER_OF_TWO,
    FormRule,
    Problem,
    Section,
    Setting,
    joined_by_or,
    setting,
    size_text,
)


@pytest.mark.parametrize(
    ("declared", "wanted", "good", "bad"),
    [
        ({}, "", [0, -1.5, "x", True, math.nan], []),
        ({"one_of": ("a", "b", "c")}, "a, b or c", ["a", "c"], ["", "d"]),
        ({"at_least": 0}, "0 or more", [0, 2**63], [-1, math.nan, math.inf]),
        ({"at_most": 9}, "at most 9", [-5, 9], [10, math.nan]),
        ({"at_least": 1, "at_most": 4096}, "1 to 4096", [1, 4096], [0, 4097]),
        ({"above": 0}, "above 0", [0.001], [0, -1, math.inf, math.nan]),
        (
            {"above": 0, "at_most": 2.5, "unit": "seconds"},
            "above 0, at most 2.5 seconds",
            [1, 2.5],
            [0, 3],
        ),
        (
            {"at_least": 1 << 16, "unit": "bytes"},
            "64KiB or more",
            [1 << 16],
            [(1 << 16) - 1],
        ),
        (
            {"form": POWER_OF_TWO, "at_most": 8},
            "a power of two, at most 8",
            [1, 2, 8],
            [0, -2, 3, 16],
        ),
        ({"form": FormRule("some text", bool)}, "some text", ["x"], [""]),
    ],
)
def test_what_a_setting_accepts(
    declared: dict[str, object], wanted: str, good: list[object], bad: list[object]
) -> None:
    one = Setting(help="h", **declared)  # type: ignore[arg-type]
    assert one.wanted == wanted
    assert [value for value in good if not one.accepts(value)] == []
    assert [value for value in bad if one.accepts(value)] == []


@pytest.mark.parametrize(
    ("declared", "value", "state"),
    [
        ({}, "x", "is 'x'"),
        ({}, "", "is empty"),
        ({}, 1.5, "is 1.5"),
        ({}, "x" * 100, "is '" + "x" * 75 + "…'"),
        ({"unit": "bytes"}, 7, "is 7 bytes"),
        ({"unit": "bytes"}, True, "is True"),
        ({"unit": "bytes"}, "7 apples", "is '7 apples'"),
        ({"is_secret": True}, "hush", "has a wrong value (not shown)"),
        ({"is_secret": True}, "", "has a wrong value (not shown)"),
    ],
)
def test_how_a_wrong_value_is_told(declared: dict[str, object], value: object, state: str) -> None:
    assert Setting(help="h", **declared).state(value) == state  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Section):
    low: int = setting(1, "the low one", at_least=0)
    high: int = setting(2, "the high one", at_most=9)

    def joint_problems(self) -> list[Problem]:
        if self.low <= self.high:
            return []
        return [Problem(("low", "high"), f"low is {self.low}: wanted at most high = {self.high}")]


def test_a_rule_about_two_settings_waits_until_each_is_right() -> None:
    assert Pair().problems() == []
    assert Pair(low=3).problems() == [Problem(("low", "high"), "low is 3: wanted at most high = 2")]
    assert Pair(low=11, high=10).problems() == [Problem(("high",), "high is 10: wanted at most 9")]


def test_words_and_sizes() -> None:
    assert [joined_by_or(words) for words in ([], ["a"], ["a", "b"])] == ["", "a", "a or b"]
    assert [size_text(size) for size in (0, 1, 1024, 1536, 5 << 20, 3 << 30)] == [
        "0",
        "1",
        "1KiB",
        "1536",
        "5MiB",
        "3GiB",
    ]
