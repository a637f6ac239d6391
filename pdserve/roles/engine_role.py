"""A prefill, decode or mixed node out of its concrete parts: Paddle, ZMQ, the placement store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from common.files.cache_folder import cache_root
from common.files.keys_folder import Keys
from common.long_lived import exclude_from_collection
from common.observing.clock import MonotonicClock
from common.observing.tracing import Tracing
from common.settings.config import Config
from node.life.engine_node import EngineNode
from node.life.make_flow import flow_maker
from node.life.make_scheduler import host_space_of, max_chunk_tokens_of, speculation_of
from node.life.node_parts import LoadedModel, NodeParts
from pdserve.roles.file_limit import allow_node_files
from pdserve.roles.kv_plane import KVPlane
from pdserve.roles.shutdown import Shutdown
from placement.store import PlacementStore


async def run_engine_role(
    config: Config,
    store: PlacementStore,
    shutdown: Shutdown,
    *,
    keys: Keys | None,
    tracing: Tracing,
) -> int:
    """Serve as `config.role` until told to end; return the exit code.

    The signals are watched again where Paddle is imported: its import installs a SIGTERM handler of
    its own, with which the process would end without draining.

    Raises what `EngineNode.run` raises, and `ConfigError` for a KV transport that cannot be used.
    """
    allow_node_files(config.handoff.kv_lanes)
    loop = asyncio.get_running_loop()
    kv = KVPlane(config, keys)

    def load_model() -> LoadedModel:
        # Imported late: it takes seconds, and a port in use or a missing store is reported first.
        from engine.runner.start.compile_progress import logged_compilation

        with logged_compilation():  # some kernels are compiled by their import
            return _loaded(config, kv, partial(loop.call_soon_threadsafe, shutdown.watch_signals))

    parts = NodeParts(
        load_model=load_model,
        make_connector=kv.connect,
        make_flow=flow_maker(config),
        store=store,
        clock=MonotonicClock(),
        keys=keys,
        kv_secret=kv.secret,
        tracing=tracing,
    )
    return await EngineNode(config, parts).run(shutdown.now, shutdown.drain, shutdown.either)


def _loaded(config: Config, kv: KVPlane, watch_again: Callable[[], object]) -> LoadedModel:
    from engine.runner.start.load import load_model_runner
    from pdserve.checkpoints.speculative_model import resolve_speculation

    runner = load_model_runner(
        config.model,
        config.engine,
        speculation=resolve_speculation(
            speculation_of(config), Path(config.model.model), load_format=config.model.load_format
        ),
        host_space=host_space_of(config),
        max_chunk_tokens=max_chunk_tokens_of(config),
        host_memory=kv.host_memory,
        host_space_memory=kv.host_space_memory,
        packed_folder=cache_root() / "packed",
        on_imported=watch_again,
    )
    exclude_from_collection()
    return cast(LoadedModel, runner)
