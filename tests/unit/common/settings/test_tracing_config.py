"""What cannot be recorded is refused with its reason."""

from __future__ import annotations

import pytest

from common.kv.token_budget import DEFAULT_NUM_SPECULATIVE_TOKENS
from common.nodes import Role
from common.settings.config import Config, EngineConfig, SpeculationConfig
from common.settings.tracing_config import TracingConfig

RECORD = TracingConfig(record="recordings")
TOKENS = ("ngram", "suffix", "mtp")
DISK = EngineConfig(prefix_host_memory=1 << 30, prefix_disk="cache", prefix_disk_size=1 << 30)


def record_problems(config: Config) -> list[str]:
    return [one.text for one in config.problems() if "record" in one.keys]


@pytest.mark.parametrize("method", DEFAULT_NUM_SPECULATIVE_TOKENS)
@pytest.mark.parametrize("role", Role)
def test_a_node_that_drafts_by_tokens_is_not_recorded(role: Role, method: str) -> None:
    speculation = SpeculationConfig(speculative_method=method)
    found = record_problems(Config(role=role, speculation=speculation, tracing=RECORD))
    text = f"wanted empty, with speculative_method = {method}, which looks at tokens"
    is_refused = role is not Role.ROUTER and method in TOKENS
    assert found == ([f"record is set: {text}"] if is_refused else [])
    assert record_problems(Config(role=role, speculation=speculation)) == []


def test_a_node_with_files_of_prefixes_is_not_recorded() -> None:
    assert record_problems(Config(role=Role.PREFILL, engine=DISK, tracing=RECORD)) == [
        "record is set: wanted empty, with prefix_disk, whose files are not recorded"
    ]
    assert record_problems(Config(role=Role.ROUTER, engine=DISK, tracing=RECORD)) == []
    assert record_problems(Config(role=Role.PREFILL, engine=DISK)) == []
