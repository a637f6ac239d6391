"""The flow of a node's role, made for the shared node runtime."""

from __future__ import annotations

from common.ids import Incarnation, new_lease_token
from common.nodes import Role
from common.settings.config import Config
from engine.core.scheduler import Scheduler
from node.flow.decode import DecodeFlow
from node.flow.landing_place import Tickets
from node.flow.prefill import PrefillFlow
from node.flow.pulls.hand_over import HandOver
from node.flow.pulls.pull_cost import PullCost
from node.flow.step_progress import expected_step_s
from node.life.node_parts import LoadedModel, MakeFlow, NodeConnector
from node.life.self_description import flow_limits, landing_place, sends_blocks


def flow_maker(config: Config) -> MakeFlow:
    """Return what makes the flow of a node with this configuration."""
    is_prefill = config.role is Role.PREFILL
    return (_prefill_flow_maker if is_prefill else _decode_flow_maker)(config)


def _prefill_flow_maker(config: Config) -> MakeFlow:
    def make(
        scheduler: Scheduler,
        model: LoadedModel,
        incarnation: Incarnation,
        connector: NodeConnector,
    ) -> PrefillFlow:
        landing = landing_place(config, model, incarnation, connector)
        return PrefillFlow(
            scheduler,
            flow_limits(config, model),
            needs_staging=model.stages_landings,
            tickets=Tickets(landing, new_lease_token),
            pull_cost=_kv_cost(model),
            hand_over=_hand_over(config, scheduler),
            disk_cost=_kv_cost(model) if config.engine.prefix_disk else None,
        )

    return make


def _kv_cost(model: LoadedModel) -> PullCost:
    """Return the rule about KV that is moved here, or computed. Each use corrects its own."""
    layout, costs = model.layout, model.step_costs
    token_bytes = layout.block_bytes / layout.block_size
    return PullCost(token_bytes, lambda num_tokens: expected_step_s(costs, num_tokens))


def _hand_over(config: Config, scheduler: Scheduler) -> HandOver | None:
    return HandOver(scheduler.pool) if sends_blocks(config) else None


def _decode_flow_maker(config: Config) -> MakeFlow:
    # A mixed node prefills every prompt itself.
    is_mixed = config.role is Role.MIXED
    threshold = None if is_mixed else config.handoff.local_prefill_threshold

    def make(
        scheduler: Scheduler,
        model: LoadedModel,
        incarnation: Incarnation,
        connector: NodeConnector,
    ) -> DecodeFlow:
        landing = landing_place(config, model, incarnation, connector)
        return DecodeFlow(
            scheduler,
            flow_limits(config, model),
            local_prefill_threshold=threshold,
            tickets=Tickets(landing, new_lease_token),
            needs_staging=model.stages_landings,
            pull_cost=_kv_cost(model),
            disk_cost=_kv_cost(model) if config.engine.prefix_disk else None,
            hand_over=_hand_over(config, scheduler),
        )

    return make
