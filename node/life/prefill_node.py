"""A prefill node: its flow, made for the shared node runtime."""

from __future__ import annotations

from common.ids import Incarnation
from common.settings.config import Config
from engine.core.scheduler import Scheduler
from node.flow.prefill import PrefillFlow
from node.life.node_parts import LoadedModel, MakeFlow, NodeConnector
from node.life.self_description import flow_limits, kv_description


def prefill_flow_maker(config: Config) -> MakeFlow:
    """Return what makes the flow of a prefill node with this configuration."""

    def make(
        scheduler: Scheduler,
        model: LoadedModel,
        incarnation: Incarnation,
        connector: NodeConnector,
    ) -> PrefillFlow:
        return PrefillFlow(
            scheduler,
            flow_limits(config, model),
            fingerprint=model.layout.fingerprint,
            kv_description=kv_description(config, model),
            needs_staging=model.stages_landings,
        )

    return make
