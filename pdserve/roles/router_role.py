"""The router out of its concrete parts: HTTP server, application, dispatcher, placement store."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from common.errors import PdserveError, PlacementUnavailable
from common.files.cache_folder import full_path
from common.files.kept_files import KeptFiles
from common.files.keys_folder import Keys
from common.files.tokenizer_files import plain_tokens_digest
from common.long_lived import exclude_from_collection
from common.model_names import model_names
from common.nodes import Role
from common.observing.clock import MonotonicClock
from common.observing.latency import LatencyTargets
from common.observing.logs import name_node
from common.observing.tracing import Tracing
from common.settings.config import Config, ModelConfig
from grammars.trying.trial import ROUTER_LIMITS
from grammars.trying.trials import GrammarTrials
from http_serving.certificate import Certificate, show_end
from http_serving.process_metrics import process_registry
from pdserve.roles.file_limit import allow_connections
from pdserve.roles.shutdown import Shutdown
from placement.store import PlacementForbidden, PlacementStore
from router.access.api_key_book import ApiKeyBook
from router.api.planning.process import PlanningProcess, planning_command
from router.app import create_app
from router.cluster.drain import drain_node
from router.cluster.role import give_role
from router.cluster.role_keeper import RoleKeeper
from router.cluster.view import DispatcherView
from router.core.placement import Placing
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.placing_recording import PlacingRecording
from router.http.server import bind_http, count_refused, router_limits, serve_http
from router.live.feed import LiveFeed
from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel

log = logging.getLogger("pdserve")

DEFAULT_HTTP_PORT = 8000


async def run_router_role(
    config: Config,
    store: PlacementStore,
    shutdown: Shutdown,
    *,
    keys: Keys | None,
    tracing: Tracing,
) -> int:
    """Serve HTTP until told to end; return the exit code, which is 1 after a bug of the router.

    Raises `PdserveError` when it cannot start: `ConfigError`, `CheckpointError` or
    `PlacementForbidden`.
    """
    # One text at a time: handing it to the tokenizer's threads would only take longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model, port = config.model, config.server.port or DEFAULT_HTTP_PORT
    chat = _chat_settings(config)
    api_keys = _api_keys(config, keys)
    certificate = _certificate(config)
    listener = bind_http(config.server.host, port)
    try:
        files = KeptFiles()
        text_model = _text_model(model, chat, files)
        await _require_welcome(store)
    except PdserveError:
        listener.close()
        raise
    registry = process_registry(lambda: Role.ROUTER, keys)
    router_id = config.server.node_id or f"router-{socket.gethostname()}-{port}"
    placing = _placing(config, plain_tokens_digest(Path(model.model), files))
    recording = _recording(config, router_id, placing)
    dispatcher = _make_dispatcher(store, placing, recording, router_id, registry, shutdown, keys)
    await dispatcher.start()
    planning = PlanningProcess(
        planning_command(model.model, model.served_model_name, model.max_model_len, chat, files),
        files,
    )
    trials = _trials(model, text_model, files)
    try:
        name_node(dispatcher.incarnation.node_id)
        roles = _make_role_keeper(config, store, dispatcher, registry)
        dispatcher.add_task(roles.run(dispatcher.incarnation), "roles")
        cluster = DispatcherView(dispatcher, roles.scaling, shutdown.drain)
        live = LiveFeed(cluster, MonotonicClock(), quotes_requests=keys is None)
        app = create_app(
            config=config,
            text_model=text_model,
            large_bodies=planning,
            trials=trials,
            generator=dispatcher,
            cluster=cluster,
            registry=registry,
            live=live,
            drain_node=partial(drain_node, dispatcher.pool),
            give_role=partial(give_role, dispatcher.pool),
            api_keys=api_keys,
            tracing=tracing,
        )
        feeding = asyncio.create_task(live.run(shutdown.either), name="live page")
        await dispatcher.pool.wait_for_nodes(shutdown.either)
        await _serve(app, listener, config, registry, shutdown, certificate)
        await feeding
    finally:
        await dispatcher.close()
        if recording is not None:
            recording.close()
        await planning.close()
        await asyncio.to_thread(trials.close)
    return int(dispatcher.has_failed)


def check_router(config: Config, model: ModelConfig | None, keys: Keys | None) -> None:
    """Read what a router reads before it opens its port; without a `model`, all but that.

    Raises `ConfigError` or `CheckpointError`.
    """
    _api_keys(config, keys)
    _certificate(config)
    if model is not None:
        _text_model(model, _chat_settings(config), KeptFiles())


def _chat_settings(config: Config) -> ChatSettings:
    return ChatSettings(
        tool_template=config.api.tool_template,
        tool_format=config.api.tool_format,
        reasoning_format=config.api.reasoning_format,
    )


def _text_model(model: ModelConfig, chat: ChatSettings, files: KeptFiles) -> TextModel:
    name, max_model_len = model.served_model_name, model.max_model_len
    return TextModel.load(Path(model.model), name, max_model_len, chat, files)


async def _require_welcome(store: PlacementStore) -> None:
    """Raise `PlacementForbidden` where the store refuses this router, which no wait would change.

    A store that is away is not waited for: until it is back, `/ready` says what is missing.
    """
    try:
        await store.live_nodes()
    except PlacementForbidden:
        raise
    except PlacementUnavailable as away:
        log.warning("starting without the placement store: %s (--redis-url says where)", away)


def _make_dispatcher(
    store: PlacementStore,
    placing: Placing,
    recording: PlacingRecording | None,
    router_id: str,
    registry: CollectorRegistry,
    shutdown: Shutdown,
    keys: Keys | None,
) -> Dispatcher:
    return Dispatcher(
        store,
        placing,
        router_id=router_id,
        registry=registry,
        on_failed=shutdown.end_now,
        clock=MonotonicClock(),
        keys=keys,
        recording=recording,
    )


def _placing(config: Config, tokens: str) -> Placing:
    return Placing(
        model=model_names(config.model.served_model_name)[0],
        lease_s=config.placement.node_lease_s,
        policy=config.placement.placement_policy,
        session_ttl_s=config.placement.session_ttl_s,
        seed=secrets.randbits(64),
        tokens=tokens,
    )


def _recording(config: Config, router_id: str, placing: Placing) -> PlacingRecording | None:
    if not config.tracing.record:
        return None
    return PlacingRecording(full_path(config.tracing.record), router_id, placing)


def _make_role_keeper(
    config: Config, store: PlacementStore, dispatcher: Dispatcher, registry: CollectorRegistry
) -> RoleKeeper:
    wanted = config.scaling
    return RoleKeeper(
        store,
        dispatcher.pool,
        LatencyTargets(ttft_s=wanted.target_ttft_s, tpot_s=wanted.target_tpot_s),
        registry=registry,
        lease_s=config.placement.node_lease_s,
        clock=MonotonicClock(),
        auto_roles=wanted.auto_roles,
    )


async def _serve(
    app: ASGIApp,
    listener: socket.socket,
    config: Config,
    registry: CollectorRegistry,
    shutdown: Shutdown,
    certificate: Certificate | None,
) -> None:
    scheme = "https" if certificate else "http"
    show_end(registry, certificate)
    log.info("listening on %s://%s:%d", scheme, config.server.host, listener.getsockname()[1])
    exclude_from_collection()
    await serve_http(
        app,
        listener,
        stop=shutdown.now,
        drain=shutdown.drain,
        drain_timeout_s=config.server.drain_timeout_s,
        limits=router_limits(allow_connections(config.api.max_connections)),
        on_refused=count_refused(registry),
        certificate=certificate,
    )


def _trials(model: ModelConfig, text_model: TextModel, files: KeptFiles) -> GrammarTrials:
    folder, vocab_size, ends = Path(model.model), text_model.vocab_size, text_model.eos_token_ids
    return GrammarTrials(folder, text_model.name, vocab_size, ends, ROUTER_LIMITS, files)


def _certificate(config: Config) -> Certificate | None:
    """Read the certificate of the HTTP port, if there is one. Raises `ConfigError`."""
    if not config.api.tls_cert:
        return None
    return Certificate(Path(config.api.tls_cert), Path(config.api.tls_key))


def _api_keys(config: Config, keys: Keys | None) -> ApiKeyBook:
    return ApiKeyBook(
        MonotonicClock(),
        path=keys.api_keys_path if keys else None,
        api_key=config.api.api_key,
        metrics_token=keys.metrics_token if keys else "",
        open_api=config.security.open_api,
    )
