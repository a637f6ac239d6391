"""A prefill node: its flow, made for the shared node runtime."""

from __future__ import annotations

from common.ids import Incarnation, new_lease_token
from common.settings.config import Config
from engine.core.scheduler import Scheduler
from node.flow.landing_place import Tickets
from node.flow.prefill import PrefillFlow
from node.flow.pull_cost import PullCost
from node.flow.step_progress import expected_step_s
from node.life.node_parts import LoadedModel, MakeFlow, NodeConnector
from node.life.self_description import can_pull, flow_limits, kv_description, landing_place


def prefill_flow_maker(config: Config) -> MakeFlow:
    """Return what makes the flow of a prefill node with this configuration."""

    def make(
        scheduler: Scheduler,
        model: LoadedModel,
        incarnation: Incarnation,
        connector: NodeConnector,
    ) -> PrefillFlow:
        pulling = None
        if can_pull(config):
            tickets = Tickets(landing_place(config, model, incarnation, connector), new_lease_token)
            pulling = tickets, _pull_cost(model)
        return PrefillFlow(
            scheduler,
            flow_limits(config, model),
            fingerprint=model.layout.fingerprint,
            kv_description=kv_description(config, model),
            needs_staging=model.stages_landings,
            pulling=pulling,
        )

    return make


def _pull_cost(model: LoadedModel) -> PullCost:
    layout, costs = model.layout, model.step_costs
    token_bytes = layout.block_bytes / layout.block_size
    return PullCost(token_bytes, lambda num_tokens: expected_step_s(costs, num_tokens))
