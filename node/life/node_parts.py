"""The concrete parts of a node, chosen in `pdserve.roles.engine_role`, and their contracts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.files.keys_folder import Keys
from common.grammar import Grammar
from common.ids import Incarnation
from common.kv.memory_plan import MemoryPlan
from common.observing.clock import Clock
from common.observing.tracing import NO_TRACING, Tracing
from engine.core.grammar_statistics import GrammarStatistics
from engine.core.scheduler import Scheduler
from engine.core.step.runner import Runner
from kv_transfer.connector.statistics import ConnectorStatistics
from kv_transfer.contract import KVConnector, OnEvent
from node.flow.landing_place import NewLeaseToken
from node.flow.node_flow import NodeFlow
from node.flow.perform_effects import StagedModel
from node.life.make_scheduler import SchedulableModel
from placement.store import PlacementStore


class LoadedModel(Runner, SchedulableModel, StagedModel, Protocol):
    """A runner, and the facts about its model and its cache that the node requires."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def memory(self) -> MemoryPlan | None: ...
    @property
    def stages_landings(self) -> bool:
        """Whether its flow has copied to a device what lands, and from it what is sent."""

    @property
    def host_kv(self) -> np.ndarray:
        """Its host blocks: uint8 `[num_layers, planes, num_host_blocks, piece_bytes]`."""

    @property
    def has_grammars(self) -> bool: ...
    def grammar_statistics(self) -> GrammarStatistics | None: ...
    def prepare_grammar(self, grammar: Grammar) -> Future[None] | None:
        """Begin to compile a grammar, on any thread; None: no step will wait for it.

        The future has the error of a grammar that cannot be followed. Raises `Overloaded`.
        """

    def warm_up(self) -> None: ...


class NodeConnector(KVConnector, Protocol):
    """A connector with the address of its landings and with statistics.

    `num_turns` counts the turns of its thread; each is short, also while there is nothing to do.
    """

    @property
    def endpoint(self) -> str: ...
    @property
    def num_turns(self) -> int: ...
    def statistics(self) -> ConnectorStatistics: ...


MakeConnector = Callable[[LoadedModel, Incarnation, OnEvent], NodeConnector]
MakeFlow = Callable[[Scheduler, LoadedModel, Incarnation, NodeConnector, NewLeaseToken], NodeFlow]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """The concrete parts of a node.

    A tensor-parallel node would attach here: `load_model` returns one `LoadedModel` whose `execute`
    runs a step on all ranks, and `make_connector` one connector over the pools of all ranks.
    """

    load_model: Callable[[], LoadedModel]
    make_connector: MakeConnector
    make_flow: MakeFlow
    store: PlacementStore
    clock: Clock
    keys: Keys | None = None
    kv_secret: bytes = b""
    """The secret of the KV key, which encrypts files of prefixes; empty: the node has no KV key."""
    tracing: Tracing = NO_TRACING
