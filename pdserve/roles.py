"""From a configuration to a running role. Concrete parts are chosen here and in `engine_role`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from common.clock import MonotonicClock
from common.config import Config
from common.errors import PdserveError
from common.nodes import Role
from pdserve.checkpoints.resolve import resolve_checkpoint
from placement.redis_store import RedisStore
from placement.store import PlacementStore
from router.app import create_app
from router.cluster import DispatcherView
from router.dispatch import Dispatcher
from router.server import bind_http, serve_http
from router.text_model import TextModel

log = logging.getLogger("pdserve")

DEFAULT_HTTP_PORT = 8000


def run_role(config: Config) -> int:
    """Run one role until SIGTERM or SIGINT; the process's exit code.

    Raises `PdserveError` when the role cannot start.
    """
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    return uvloop.run(_run(config))


async def _run(config: Config) -> int:
    stop = asyncio.Event()
    _watch_stop_signals(stop)
    folder = resolve_checkpoint(config.model.model)
    config = _with_model(config, folder)
    store = RedisStore(config.placement.redis_url, config.placement.cluster)
    try:
        if config.role is Role.ROUTER:
            return await _run_router(config, folder, store, stop)
        # Imported here: a router's image has none of what it needs.
        from pdserve.engine_role import run_engine_role

        watch_again = partial(_watch_stop_signals, stop)
        return await run_engine_role(config, store, stop, watch_stop_signals=watch_again)
    finally:
        await store.close()


def _watch_stop_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _run_router(
    config: Config, folder: Path, store: PlacementStore, stop: asyncio.Event
) -> int:
    host, port = config.server.host, config.server.port or DEFAULT_HTTP_PORT
    listener = bind_http(host, port)
    try:
        text_model = TextModel.load(
            folder, config.model.served_model_name, config.model.max_model_len
        )
        # A router without a store would never find a node: say so now, not at the first request.
        await store.live_nodes()
    except PdserveError:
        listener.close()
        raise
    registry = CollectorRegistry()
    dispatcher = Dispatcher(
        store,
        router_id=config.server.node_id or f"router-{socket.gethostname()}-{port}",
        model=config.model.served_model_name,
        policy=config.placement.placement_policy,
        node_lease_s=config.placement.node_lease_s,
        registry=registry,
        on_failed=stop.set,
        clock=MonotonicClock(),
    )
    await dispatcher.start()
    try:
        app = create_app(
            config=config,
            text_model=text_model,
            generator=dispatcher,
            cluster=DispatcherView(dispatcher),
            registry=registry,
        )
        log.info("listening on http://%s:%d", host, port)
        await serve_http(app, listener, stop=stop)
    finally:
        await dispatcher.close()
    return int(dispatcher.has_failed)


def _with_model(config: Config, folder: Path) -> Config:
    name = config.model.served_model_name or folder.name
    model = replace(config.model, model=str(folder), served_model_name=name)
    return replace(config, model=model)
