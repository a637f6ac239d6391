"""Bad values of scheduling and speculation: each is named with its limit, and all at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.nodes import Role
from common.settings.config import (
    Config,
    EngineConfig,
    ModelConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from common.settings.setting import Section

NODES = [Role.PREFILL, Role.DECODE, Role.MIXED]


def texts(config: Section | Config) -> list[str]:
    return [problem.text for problem in config.problems()]


@pytest.mark.parametrize("role", list(Role))
def test_the_defaults_are_legal(role: Role) -> None:
    assert Config(role=role, model=ModelConfig(model="m")).problems() == []


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "mtp"])
def test_every_method_is_legal_with_a_small_budget(method: str) -> None:
    config = Config(
        role=Role.MIXED,
        model=ModelConfig(model="m"),
        engine=EngineConfig(max_num_batched_tokens=512),
        speculation=SpeculationConfig(speculative_method=method),
    )
    assert config.problems() == []


FIRST = "reserve_output_block_num_for_decode_when_schedule_new_prefill"
DECAY = "reserve_decay_output_block_num_for_decode_when_schedule_new_prefill"
LOWEST = "reserve_min_output_block_num_for_decode_when_schedule_new_prefill"

BAD_SCHEDULING: list[tuple[dict[str, Any], str]] = [
    (
        {"reservation_policy": "ratio"},
        "reservation_policy is 'ratio': wanted none, fixed_blocks, token_ratio, global_ratio or "
        "learned",
    ),
    (
        {"preemption_policy": "lifo"},
        "preemption_policy is 'lifo': wanted last_in_first_out, shortest_output or priority",
    ),
    ({"preemption_mode": ""}, "preemption_mode is empty: wanted recompute or swap"),
    ({"async_scheduling": "true"}, "async_scheduling is 'true': wanted auto, on or off"),
    ({"requeue": "head"}, "requeue is 'head': wanted arrival or tail"),
    ({"init_new_token_ratio": 1.01}, "init_new_token_ratio is 1.01: wanted 0 to 1"),
    ({"init_new_token_ratio": math.nan}, "init_new_token_ratio is nan: wanted 0 to 1"),
    ({"min_new_token_ratio": -0.1}, "min_new_token_ratio is -0.1: wanted 0 to 1"),
    ({"min_new_token_ratio_factor": 2.0}, "min_new_token_ratio_factor is 2.0: wanted 0 to 1"),
    ({"new_token_ratio_decay_steps": -1}, "new_token_ratio_decay_steps is -1: wanted 0 or more"),
    ({"clip_max_new_tokens": 0}, "clip_max_new_tokens is 0: wanted 1 or more"),
    ({"retract_extra_tokens": -2}, "retract_extra_tokens is -2: wanted -1 or more"),
    ({"schedule_conservativeness": 0.0}, "schedule_conservativeness is 0.0: wanted above 0"),
    (
        {"schedule_conservativeness": math.inf},
        "schedule_conservativeness is inf: wanted above 0",
    ),
    ({FIRST: -1}, f"{FIRST} is -1: wanted 0 or more"),
    ({DECAY: -0.5}, f"{DECAY} is -0.5: wanted 0 or more"),
    ({DECAY: math.inf}, f"{DECAY} is inf: wanted 0 or more"),
    ({LOWEST: -1}, f"{LOWEST} is -1: wanted 0 or more"),
    ({"swap_space": -1}, "swap_space is -1 bytes: wanted 0 or more"),
    ({"retract_decode_steps": -1}, "retract_decode_steps is -1: wanted 0 or more"),
    ({"min_progress_tokens": -1}, "min_progress_tokens is -1: wanted 0 or more"),
    ({"skip_ahead_window": -1}, "skip_ahead_window is -1: wanted 0 or more"),
    ({"learned_output_quantile": 1.1}, "learned_output_quantile is 1.1: wanted 0 to 1"),
    (
        {"reservation_policy": "learned", "init_new_token_ratio": 0.0},
        "init_new_token_ratio is 0.0: wanted above 0, with reservation_policy = learned",
    ),
    ({"priority_pass_limit": 0}, "priority_pass_limit is 0: wanted 1 or more"),
    (
        {"long_prefill_token_threshold": -1},
        "long_prefill_token_threshold is -1: wanted 0 or more",
    ),
    ({"skip_ahead_limit": -1}, "skip_ahead_limit is -1: wanted 0 or more"),
    ({"chunk_granularity": 0}, "chunk_granularity is 0: wanted a power of two"),
    ({"chunk_granularity": 48}, "chunk_granularity is 48: wanted a power of two"),
    (
        {"reservation_policy": "token_ratio", "init_new_token_ratio": 0.05},
        "min_new_token_ratio is 0.1: wanted above 0, at most the initial share, "
        "with init_new_token_ratio = 0.05 and reservation_policy = token_ratio",
    ),
    (
        {"reservation_policy": "token_ratio", "min_new_token_ratio": 0.0},
        "min_new_token_ratio is 0.0: wanted above 0, at most the initial share, "
        "with init_new_token_ratio = 0.7 and reservation_policy = token_ratio",
    ),
    (
        {"reservation_policy": "global_ratio", "init_new_token_ratio": 0.0},
        "init_new_token_ratio is 0.0: wanted above 0, with reservation_policy = global_ratio",
    ),
    (
        {"reservation_policy": "global_ratio", "min_new_token_ratio_factor": 0.0},
        "min_new_token_ratio_factor is 0.0: wanted above 0, with reservation_policy = global_ratio",
    ),
    (
        {"reservation_policy": "fixed_blocks", LOWEST: 17},
        f"{LOWEST} is 17: wanted at most the initial number, with {FIRST} = 16 and "
        "reservation_policy = fixed_blocks",
    ),
    (
        {"preemption_mode": "swap", "swap_space": 0},
        "swap_space is 0 bytes: wanted room for some KV blocks, such as 256MiB, "
        "with preemption_mode = swap",
    ),
]


@pytest.mark.covers("S55")
@pytest.mark.parametrize(("settings", "problem"), BAD_SCHEDULING)
def test_a_bad_setting_of_scheduling(settings: dict[str, Any], problem: str) -> None:
    assert texts(SchedulingConfig(**settings)) == [problem]


@pytest.mark.parametrize(
    "settings",
    [
        {"reservation_policy": "none", "init_new_token_ratio": 0.0},
        {"reservation_policy": "global_ratio", "min_new_token_ratio": 0.9},
        {"reservation_policy": "token_ratio", LOWEST: 17},
        {"reservation_policy": "token_ratio", "init_new_token_ratio": 0.1},
        {"reservation_policy": "token_ratio", "init_new_token_ratio": 1.0},
        {"reservation_policy": "fixed_blocks", LOWEST: 16, DECAY: 0.0},
        {"new_token_ratio_decay_steps": 0, "retract_decode_steps": 0, "retract_extra_tokens": 0},
        {"skip_ahead_window": 0, "skip_ahead_limit": 0, "min_progress_tokens": 0},
        {"preemption_mode": "recompute", "swap_space": 0},
        {"chunk_granularity": 64},
        {"chunk_granularity": 64, "long_prefill_token_threshold": 63},
        {"priority_pass_limit": 1},
    ],
)
def test_the_edges_are_legal(settings: dict[str, Any]) -> None:
    config = Config(
        role=Role.MIXED, model=ModelConfig(model="m"), scheduling=SchedulingConfig(**settings)
    )
    assert config.problems() == []


@pytest.mark.covers("S55")
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"speculative_method": "eagle"},
            "speculative_method is 'eagle': wanted none, ngram, suffix, mtp or grammar",
        ),
        (
            {"speculative_method": "ngram", "num_speculative_tokens": 65},
            "num_speculative_tokens is 65: wanted 0 to 64",
        ),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1: wanted 0 to 64"),
        (
            {"speculative_method": "ngram", "speculative_model": "head.safetensors"},
            "speculative_model is 'head.safetensors': wanted no file (only mtp reads one), "
            "with speculative_method = ngram",
        ),
    ],
)
def test_a_bad_setting_of_speculation(settings: dict[str, Any], problem: str) -> None:
    assert texts(SpeculationConfig(**settings)) == [problem]


def node(role: Role, cap: int, seats: int, drafts: int = 0, granularity: int = 1) -> list[str]:
    config = Config(
        role=role,
        model=ModelConfig(model="m"),
        engine=EngineConfig(max_num_batched_tokens=cap, max_num_seqs=seats),
        scheduling=SchedulingConfig(chunk_granularity=granularity),
        speculation=SpeculationConfig(
            speculative_method="mtp" if drafts else "none", num_speculative_tokens=drafts
        ),
    )
    return texts(config)


@pytest.mark.covers("B02", "E08", "S51", "S52")
@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
def test_a_budget_too_small_for_all_seats_names_every_number(role: Role) -> None:
    assert node(role, 2048, 512, drafts=4) == [
        "max_num_batched_tokens is 2048: wanted at least 2560 for max_num_seqs = 512 sequences of "
        "5 tokens (1 and num_speculative_tokens = 4 of speculative_method = mtp), or max_num_seqs "
        "at most 409"
    ]
    # What the text says is enough, and one less is not.
    assert node(role, 2560, 512, drafts=4) == node(role, 2048, 409, drafts=4) == []
    assert len(node(role, 2559, 512, drafts=4)) == len(node(role, 2048, 410, drafts=4)) == 1


@pytest.mark.covers("E06", "E07")
@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
def test_the_edge_is_legal(role: Role) -> None:
    assert node(role, 2048, 256, drafts=5) == []
    assert node(role, 512, 256, drafts=1) == []
    (problem,) = node(role, 511, 256, drafts=1)
    assert "wanted at least 512" in problem


@pytest.mark.covers("E12", "S53")
def test_one_seat_can_always_compute_a_chunk() -> None:
    assert node(Role.MIXED, 574, 256, drafts=1, granularity=64) == []
    (problem,) = node(Role.MIXED, 573, 256, drafts=1, granularity=64)
    assert problem == (
        "max_num_batched_tokens is 573: wanted at least 574 for all but one of max_num_seqs = 256 "
        "sequences of 2 tokens (1 and num_speculative_tokens = 1 of speculative_method = mtp), "
        "and a chunk of chunk_granularity = 64 tokens for the last, or max_num_seqs at most 255"
    )
    assert node(Role.MIXED, 573, 255, drafts=1, granularity=64) == []
    assert len(node(Role.MIXED, 512, 256, drafts=1, granularity=64)) == 1
    # A decode node computes prompts too, when it resumes a preempted sequence.
    assert node(Role.DECODE, 573, 256, drafts=1, granularity=64) == [problem]


@pytest.mark.covers("S51")
def test_both_budget_rules_are_told() -> None:
    assert node(Role.MIXED, 60, 2, granularity=64) == [
        "max_num_batched_tokens is 60: wanted at least 65 for all but one of max_num_seqs = 2 "
        "sequences of 1 token (speculative_method = none), and a chunk of chunk_granularity = 64 "
        "tokens for the last"
    ]
    both = node(Role.MIXED, 100, 256, drafts=1, granularity=64)
    assert [text.split()[6] for text in both] == ["512", "574"]


def test_a_prefill_node_holds_one_chunk_and_a_router_nothing() -> None:
    assert node(Role.PREFILL, 64, 256, drafts=8, granularity=64) == []
    assert node(Role.PREFILL, 63, 256, granularity=64) == [
        "max_num_batched_tokens is 63: wanted at least chunk_granularity = 64, one chunk"
    ]
    assert node(Role.ROUTER, 1, 256, drafts=8, granularity=64) == []


@pytest.mark.parametrize("role", NODES)
def test_a_chunk_is_at_most_a_block(role: Role) -> None:
    assert node(role, 8192, 8, granularity=128) == [
        "chunk_granularity is 128: wanted at most block_size = 64"
    ]


@pytest.mark.covers("B26")
def test_the_number_in_the_text_is_the_limit() -> None:
    assert texts(EngineConfig(max_num_seqs=4096)) == []
    assert texts(EngineConfig(max_num_seqs=4097)) == ["max_num_seqs is 4097: wanted 1 to 4096"]
    assert texts(EngineConfig(prefix_host_memory=-1)) == [
        "prefix_host_memory is -1 bytes: wanted 0 or more"
    ]
    assert texts(EngineConfig(prefix_host_memory=1 << 30, enable_prefix_caching=False)) == [
        "prefix_host_memory is 1073741824 bytes: wanted 0, because no prefix is reused, with "
        "enable_prefix_caching = False"
    ]
    assert texts(EngineConfig(prefix_host_memory=1 << 30)) == []
    assert (
        texts(EngineConfig(prefix_host_memory=1 << 30, prefix_disk="/x", prefix_disk_size=1 << 30))
        == []
    )
    assert texts(EngineConfig(prefix_disk="/x", prefix_disk_size=1 << 30)) == [
        "prefix_disk is '/x': wanted empty, because what is on disk passes host memory, with "
        "prefix_host_memory = 0"
    ]
    assert texts(EngineConfig(prefix_host_memory=1 << 30, prefix_disk="/x")) == [
        "prefix_disk_size is 0 bytes: wanted a size of 1MiB or more, with prefix_disk = /x"
    ]
    assert texts(EngineConfig(prefix_disk_size=1 << 30)) == [
        "prefix_disk_size is 1073741824 bytes: wanted 0, because there is no folder, with "
        "prefix_disk = "
    ]
    assert texts(EngineConfig(max_num_batched_tokens=0)) == [
        "max_num_batched_tokens is 0: wanted 1 or more"
    ]


@pytest.mark.covers("S51")
def test_every_violated_rule_is_listed() -> None:
    config = Config(
        role=Role.DECODE,
        model=ModelConfig(model="m"),
        engine=EngineConfig(max_num_batched_tokens=8),
        scheduling=SchedulingConfig(
            init_new_token_ratio=2.0, clip_max_new_tokens=0, requeue="front", skip_ahead_window=-1
        ),
        speculation=SpeculationConfig(speculative_method="medusa", num_speculative_tokens=-1),
    )
    assert [problem.keys[0] for problem in config.problems()] == [
        "init_new_token_ratio",
        "clip_max_new_tokens",
        "requeue",
        "skip_ahead_window",
        "speculative_method",
        "num_speculative_tokens",
    ]


@pytest.mark.covers("B27", "S56")
def test_there_is_one_default_budget() -> None:
    assert EngineConfig().max_num_batched_tokens == 8192
