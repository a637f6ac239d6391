"""The alert and recording rules, by Prometheus' own tool."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chart.manifests import ROOT
from tests.support.commands import CommandFailed, run

OBSERVABILITY = ROOT / "compose" / "observability"
RULES = OBSERVABILITY / "rules.yaml"
TESTS = Path(__file__).parent / "rule_tests.yaml"


def test_the_rules_fire_when_they_should_and_only_then(promtool: Path, tmp_path: Path) -> None:
    for file in (RULES, TESTS):
        shutil.copy(file, tmp_path)
    run([str(promtool), "test", "rules", str(tmp_path / TESTS.name)], limit_s=60.0)


def test_a_rule_that_does_not_fire_is_noticed(promtool: Path, tmp_path: Path) -> None:
    for file in (RULES, TESTS):
        shutil.copy(file, tmp_path)
    rules = RULES.read_text().replace("> 0.95", "> 0.99")
    (tmp_path / RULES.name).write_text(rules)
    with pytest.raises(CommandFailed, match="KvBlocksFull"):
        run([str(promtool), "test", "rules", str(tmp_path / TESTS.name)], limit_s=60.0)


def test_every_file_for_prometheus_is_right(promtool: Path) -> None:
    rules = ["rules", "--lint=all", "--lint-fatal", str(RULES)]
    files = sorted(OBSERVABILITY.glob("prometheus*.yaml"))
    assert len(files) == 2
    for what in (rules, *(["config", "--syntax-only", str(file)] for file in files)):
        run([str(promtool), "check", *what], limit_s=60.0)
