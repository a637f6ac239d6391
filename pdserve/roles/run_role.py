"""From a configuration to a running role: what all roles share."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import uvloop
from prometheus_client import disable_created_metrics

from common.errors import PlacementUnavailable
from common.files.keys_folder import Keys, load_keys
from common.nodes import Role
from common.observing.logs import flush_logs, set_up_logs
from common.settings.config import Config
from pdserve.checkpoints.resolve import names_of, resolve_checkpoint
from pdserve.roles.certificate_watch import CertificateWatch
from pdserve.roles.make_tracing import make_tracing
from pdserve.roles.process_limits import require_threads, warn_of_little_address_space
from pdserve.roles.shutdown import Shutdown
from placement.redis_store import RedisStore


def run_role(config: Config) -> int:
    """Run one role until a signal ends it, see `pdserve.roles.shutdown`; return the exit code.

    Raises `PdserveError` when the role cannot start.
    """
    server = config.server
    require_threads()
    set_up_logs(server.log_level, server.log_format, role=config.role.value, node_id=server.node_id)
    # One more series for each counter and histogram, which no dashboard reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    warn_of_little_address_space()
    try:
        return uvloop.run(_run(config))
    finally:
        flush_logs()  # what ends the role is said behind it


async def _run(config: Config) -> int:
    shutdown = Shutdown()
    shutdown.watch_signals()
    keys = _load_keys(config)
    watching = keys and asyncio.create_task(CertificateWatch(keys).keep_current())
    tracing = make_tracing(config)
    folder = resolve_checkpoint(config.model.model)
    config = _with_model(config, folder)
    store = RedisStore(config.placement.redis_url, config.placement.cluster, keys=keys)
    try:
        # Imported here: a router's image has no Paddle, and a node needs nothing of the router.
        if config.role is Role.ROUTER:
            from pdserve.roles.router_role import run_router_role

            return await run_router_role(config, store, shutdown, keys=keys, tracing=tracing)
        from pdserve.roles.engine_role import run_engine_role

        return await run_engine_role(config, store, shutdown, keys=keys, tracing=tracing)
    except PlacementUnavailable as away:
        raise PlacementUnavailable(f"{away} (--redis-url says where it is)") from away
    finally:
        if watching:
            watching.cancel()
        await store.close()
        await asyncio.to_thread(tracing.close)


def _load_keys(config: Config) -> Keys | None:
    """Load the folder of `--keys`, if there is one."""
    if not config.security.keys:
        return None
    return load_keys(Path(config.security.keys), config.role)


def _with_model(config: Config, folder: Path) -> Config:
    """Put the checkpoint's folder into the configuration, and its names where none is set."""
    name = config.model.served_model_name or names_of(config.model.model, folder)
    model = replace(config.model, model=str(folder), served_model_name=name)
    return replace(config, model=model)
