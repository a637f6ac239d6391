"""From a configuration to a running role. Concrete parts are chosen here and in `engine_role`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from common.clock import MonotonicClock
from common.config import Config
from common.errors import PdserveError
from common.keys_folder import Keys, load_keys
from common.logs import name_node, set_up_logs
from common.nodes import Role
from common.tracing import Tracing
from pdserve.checkpoints.resolve import resolve_checkpoint
from pdserve.roles.file_limit import allow_connections
from pdserve.roles.make_tracing import make_tracing
from pdserve.roles.shutdown import Ending
from placement.redis_store import RedisStore
from placement.store import PlacementStore, PlacementUnavailable, retry_while_slow
from router.access.api_key_book import ApiKeyBook
from router.app import create_app
from router.cluster.drain import drain_node
from router.cluster.view import DispatcherView
from router.dispatch.dispatcher import Dispatcher
from router.http.server import bind_http, count_refused, router_limits, serve_http
from router.live.feed import LiveFeed
from router.text.text_model import TextModel

log = logging.getLogger("pdserve")

DEFAULT_HTTP_PORT = 8000
_GC_THRESHOLD = 10_000
"""Objects made and not yet gone before the collector looks for cycles among them."""
_WARN_DAYS = 30


def run_role(config: Config) -> int:
    """Run one role until a signal ends it, see `pdserve.roles.shutdown`; the process's exit code.

    Raises `PdserveError` when the role cannot start.
    """
    server = config.server
    set_up_logs(server.log_level, server.log_format, role=config.role.value, node_id=server.node_id)
    # A series more per counter and histogram, which no dashboard reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return uvloop.run(_run(config))


async def _run(config: Config) -> int:
    ending = Ending()
    ending.watch_signals()
    keys = _keys_of(config)
    tracing = make_tracing(config)
    folder = resolve_checkpoint(config.model.model)
    config = _with_model(config, folder)
    store = RedisStore(config.placement.redis_url, config.placement.cluster, keys=keys)
    try:
        if config.role is Role.ROUTER:
            return await _run_router(config, folder, store, ending, keys, tracing)
        # Imported here: a router's image has none of what it needs.
        from pdserve.roles.engine_role import run_engine_role

        return await run_engine_role(config, store, ending, keys=keys, tracing=tracing)
    except PlacementUnavailable as away:
        raise PlacementUnavailable(f"{away} (--redis-url says where it is)") from away
    finally:
        await store.close()
        await asyncio.to_thread(tracing.close)


def _keys_of(config: Config) -> Keys | None:
    """What the folder of `--keys` holds; says in time when its certificate ends."""
    if not config.security.keys:
        return None
    keys = load_keys(Path(config.security.keys), config.role)
    num_days = (keys.expires_at_s - time.time()) / 86400
    if num_days < _WARN_DAYS:
        log.warning(
            "the certificate in %s ends in %.0f days: `pdserve keys renew DIR %s` makes a new one",
            keys.folder,
            num_days,
            keys.redis_user,
        )
    return keys


async def _run_router(
    config: Config,
    folder: Path,
    store: PlacementStore,
    ending: Ending,
    keys: Keys | None,
    tracing: Tracing,
) -> int:
    # One text at a time: handing it to the tokenizer's threads would only take longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    host, port = config.server.host, config.server.port or DEFAULT_HTTP_PORT
    api_keys = _api_keys(config, keys)
    listener = bind_http(host, port)
    try:
        text_model = TextModel.load(
            folder, config.model.served_model_name, config.model.max_model_len
        )
        # A router without a store would never find a node: say so now, not at the first request.
        await retry_while_slow(store.live_nodes)
    except PdserveError:
        listener.close()
        raise
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    dispatcher = Dispatcher(
        store,
        router_id=config.server.node_id or f"router-{socket.gethostname()}-{port}",
        model=config.model.served_model_name,
        policy=config.placement.placement_policy,
        node_lease_s=config.placement.node_lease_s,
        registry=registry,
        on_failed=ending.end_now,
        clock=MonotonicClock(),
        keys=keys,
    )
    await dispatcher.start()
    try:
        cluster = DispatcherView(dispatcher, ending.drain)
        live = LiveFeed(cluster, MonotonicClock())
        feeding = asyncio.create_task(live.run(ending.either), name="live page")
        app = create_app(
            config=config,
            text_model=text_model,
            generator=dispatcher,
            cluster=cluster,
            registry=registry,
            live=live,
            drain_node=partial(drain_node, dispatcher.pool),
            api_keys=api_keys,
            tracing=tracing,
        )
        name_node(dispatcher.incarnation.node_id)
        await dispatcher.wait_for_nodes(ending.either)
        log.info("listening on http://%s:%d", host, port)
        _spare_what_stays()
        await serve_http(
            app,
            listener,
            stop=ending.now,
            drain=ending.drain,
            drain_timeout_s=config.server.drain_timeout_s,
            limits=router_limits(allow_connections(config.api.max_connections)),
            on_refused=count_refused(registry),
        )
        await feeding
    finally:
        await dispatcher.close()
    return int(dispatcher.has_failed)


def _api_keys(config: Config, keys: Keys | None) -> ApiKeyBook:
    return ApiKeyBook(
        MonotonicClock(),
        path=keys.api_keys_path if keys else None,
        api_key=config.api.api_key,
        metrics_token=keys.metrics_token if keys else "",
    )


def _spare_what_stays() -> None:
    """Modules, routes and the tokenizer stay as long as the process: the garbage collector, which
    runs every few requests, need not go through them each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _with_model(config: Config, folder: Path) -> Config:
    name = config.model.served_model_name or folder.name
    model = replace(config.model, model=str(folder), served_model_name=name)
    return replace(config, model=model)
