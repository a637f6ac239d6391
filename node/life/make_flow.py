"""The flow of a node, made for the shared node runtime."""

from __future__ import annotations

from common.ids import Incarnation
from common.settings.config import Config
from engine.core.scheduler import Scheduler
from node.flow.landing_place import NewLeaseToken, Tickets
from node.flow.node_flow import NodeFlow
from node.flow.pulls.hand_over import HandOver
from node.flow.pulls.pull_cost import PullCost
from node.flow.step_progress import expected_step_s
from node.life.node_parts import LoadedModel, MakeFlow, NodeConnector
from node.life.self_description import flow_limits, landing_place


def flow_maker(config: Config) -> MakeFlow:
    """Return what makes the flow of a node with this configuration."""

    def make(
        scheduler: Scheduler,
        model: LoadedModel,
        incarnation: Incarnation,
        connector: NodeConnector,
        new_lease_token: NewLeaseToken,
    ) -> NodeFlow:
        landing = landing_place(config, model, incarnation, connector)
        return NodeFlow(
            scheduler,
            flow_limits(config, model),
            tickets=Tickets(landing, new_lease_token),
            needs_staging=model.stages_landings,
            local_prefill_threshold=config.handoff.local_prefill_threshold,
            pull_cost=_kv_cost(model),
            disk_cost=_kv_cost(model) if config.engine.prefix_disk else None,
            hand_over=HandOver(scheduler.prefix_transfers),
        )

    return make


def _kv_cost(model: LoadedModel) -> PullCost:
    """Return the rule about KV that is moved here, or computed. Each use corrects its own."""
    layout, costs = model.layout, model.step_costs
    token_bytes = layout.block_bytes / layout.block_size
    return PullCost(token_bytes, lambda num_tokens: expected_step_s(costs, num_tokens))
