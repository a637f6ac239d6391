"""A decode or mixed node: its flow, made for the shared node runtime."""

from __future__ import annotations

from common.ids import Incarnation, new_lease_token
from common.nodes import Role
from common.settings.config import Config
from engine.core.scheduler import Scheduler
from node.flow.decode import DecodeFlow
from node.life.node_parts import LoadedModel, MakeFlow, NodeConnector
from node.life.self_description import flow_limits, landing_place


def decode_flow_maker(config: Config) -> MakeFlow:
    """Return what makes the flow of a decode or mixed node with this configuration."""

    # A mixed node prefills every prompt itself.
    is_mixed = config.role is Role.MIXED
    threshold = None if is_mixed else config.handoff.local_prefill_threshold

    def make(
        scheduler: Scheduler,
        model: LoadedModel,
        incarnation: Incarnation,
        connector: NodeConnector,
    ) -> DecodeFlow:
        return DecodeFlow(
            scheduler,
            flow_limits(config, model),
            local_prefill_threshold=threshold,
            place=landing_place(config, model, incarnation, connector),
            new_lease_token=new_lease_token,
            needs_staging=model.stages_landings,
        )

    return make
