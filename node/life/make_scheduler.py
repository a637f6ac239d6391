"""A node's scheduler, from its configuration and the facts of its model and cache."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Protocol

from common.kv.kv_layout import KVLayout
from common.kv.token_budget import get_max_chunk_tokens, num_speculative_tokens, tokens_per_seq
from common.nodes import Role
from common.settings.config import Config, SpeculationConfig
from engine.core.blocks.disk_index import DiskIndex
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import StepCosts
from engine.core.scheduler import Scheduler
from engine.core.speculation.speculation import make_speculation
from node.life.possible_roles import can_decode


class SchedulableModel(Protocol):
    """The facts of a model and its cache that a scheduler requires."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_host_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> Set[int]: ...
    @property
    def pairs_per_token(self) -> int: ...
    @property
    def step_costs(self) -> StepCosts: ...
    @property
    def needs_staging(self) -> bool: ...
    @property
    def can_go_on(self) -> bool: ...


class RunningModel(Protocol):
    """The fact about a model that decides whether planning disturbs its steps."""

    @property
    def needs_staging(self) -> bool: ...


def speculation_of(config: Config) -> SpeculationConfig:
    """Return how this node drafts.

    A node that can only prefill drafts by nothing but mtp. One that decodes finds all other drafts
    in the tokens itself.
    """
    speculation = config.speculation
    if speculation.speculative_method not in ("none", "mtp") and not can_decode(config):
        return replace(speculation, speculative_method="none")
    return speculation


def host_space_of(config: Config) -> int:
    """Return the host memory for swapped blocks and prefixes, in bytes.

    A prefill node never preempts. When it is moved to decoding, it recomputes what it preempts.
    """
    can_swap = config.role is not Role.PREFILL and config.scheduling.preemption_mode == "swap"
    swap_space = config.scheduling.swap_space if can_swap else 0
    return swap_space + config.engine.prefix_host_memory


def max_chunk_tokens_of(config: Config) -> int:
    """Return the maximum number of tokens of a step of this node.

    Its scheduler plans no more, and its memory is planned for as many.
    """
    speculation = speculation_of(config)
    return get_max_chunk_tokens(
        config.role,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        tokens_per_seq=tokens_per_seq(
            speculation.speculative_method, speculation.num_speculative_tokens
        ),
        chunk_granularity=config.scheduling.chunk_granularity,
        has_local_prefill=config.handoff.local_prefill_threshold > 0,
    )


def plans_ahead(config: Config, model: RunningModel) -> bool:
    """Return whether steps run on a thread of their own while the next one is planned.

    A model with memory of its own computes on a device. On a CPU the kernels need the core that
    planning would take.
    """
    chosen = config.scheduling.async_scheduling
    return chosen == "on" or (chosen == "auto" and model.needs_staging)


def make_scheduler(
    config: Config, model: SchedulableModel, disk_index: DiskIndex | None = None
) -> Scheduler:
    """Return the scheduler of a node with this configuration and model."""
    engine, speculation = config.engine, speculation_of(config)
    return Scheduler(
        limits=StepLimits(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=max_chunk_tokens_of(config),
            block_size=engine.block_size,
            max_model_len=model.max_model_len,
            num_speculative_tokens=num_speculative_tokens(
                speculation.speculative_method, speculation.num_speculative_tokens
            ),
            chunk_granularity=config.scheduling.chunk_granularity,
            pairs_per_token=model.pairs_per_token,
        ),
        num_blocks=model.num_blocks,
        fingerprint=model.layout.fingerprint,
        eos_token_ids=model.eos_token_ids,
        enable_prefix_caching=engine.enable_prefix_caching,
        config=config.scheduling,
        speculation=make_speculation(speculation, model.step_costs),
        num_host_blocks=model.num_host_blocks,
        keeps_prefixes=engine.prefix_host_memory > 0,
        disk_index=disk_index,
        swaps_late=model.needs_staging,
        can_go_on=model.can_go_on and plans_ahead(config, model),
    )
