"""What a node publishes about itself: its record in the placement store, limits, log lines."""

from __future__ import annotations

import logging
import socket
from dataclasses import asdict, replace
from pathlib import Path

from common.addresses import host_port
from common.files.tokenizer_files import plain_tokens_digest
from common.ids import Incarnation
from common.kv.token_budget import num_speculative_tokens
from common.model_names import model_names
from common.nodes import NodeRecord, Role
from common.settings.config import Config, ServerConfig
from common.version import PROTOCOL_VERSION, VERSION
from kv_transfer.shared.limits import PROTOCOL_VERSION as KV_PROTOCOL_VERSION
from node.flow.flow_limits import FlowLimits
from node.flow.landing_place import LandingPlace
from node.life.make_scheduler import speculation_of
from node.life.node_parts import LoadedModel, NodeConnector
from node.life.prefix_disk import disk_index_of

log = logging.getLogger("pdserve.node")

UPTIME_STEPS_S = ((3600, 60), (60, 10))
"""Pairs of seconds: from the first on, the uptime is reported in steps of the second.

An idle node says the same for so long, and a router takes over only what is new. `pdserve status`
shows hours and minutes after an hour.
"""


def told_uptime_s(uptime_s: float) -> int:
    """Return the uptime that a node tells: at least 1 s, after a minute in steps."""
    whole_s = max(1, round(uptime_s))
    step_s = next((step_s for from_s, step_s in UPTIME_STEPS_S if whole_s >= from_s), 1)
    return whole_s - whole_s % step_s


def node_records(
    config: Config,
    model: LoadedModel,
    incarnation: Incarnation,
    ports: tuple[int, int],
    roles: tuple[Role, ...],
) -> dict[Role, NodeRecord]:
    """Return the record with which the node registers in each of the roles that it can be given.

    The ports are those of its control service and of its metrics.
    """
    tokens = plain_tokens_digest(Path(config.model.model))
    records = {
        role: _record(replace(config, role=role), model, incarnation, ports, roles)
        for role in roles
    }
    return {role: replace(record, tokens=tokens) for role, record in records.items()}


def _record(
    config: Config,
    model: LoadedModel,
    incarnation: Incarnation,
    ports: tuple[int, int],
    roles: tuple[Role, ...],
) -> NodeRecord:
    port, metrics_port = ports
    host = advertised_host(config.server)
    disk = disk_index_of(config, model)
    return NodeRecord(
        node_id=incarnation.node_id,
        epoch=incarnation.epoch,
        role=config.role,
        control_address=host_port(host, port),
        metrics_address=host_port(host, metrics_port),
        model=model_names(config.model.served_model_name)[0],
        fingerprint=model.layout.fingerprint,
        block_size=config.engine.block_size,
        num_blocks=model.num_blocks,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=model.max_model_len,
        kv_description=kv_description(config, model),
        speculative_method=_drafts_by(config),
        version=VERSION,
        protocol=PROTOCOL_VERSION,
        kv_protocol=KV_PROTOCOL_VERSION,
        has_grammars=model.has_grammars,
        has_token_rules=True,
        has_prompt_logprobs=True,
        sends_blocks=True,
        kv_cache_bytes=model.num_blocks * model.layout.block_bytes,
        device=model.device,
        num_host_blocks=model.num_host_blocks,
        num_disk_blocks=0 if disk is None else disk.most_blocks,
        roles=roles,
        lease_ms=round(1000 * config.placement.node_lease_s),
    )


def _drafts_by(config: Config) -> str:
    """Return how a node of this role drafts. A prefill node drafts only by mtp."""
    method = speculation_of(config).speculative_method
    return method if config.role is not Role.PREFILL or method == "mtp" else "none"


def flow_limits(config: Config, model: LoadedModel) -> FlowLimits:
    """Return what a node of this configuration accepts with this model."""
    return FlowLimits(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        max_queued_requests=config.handoff.max_queued_requests,
        sheds=config.scheduling.shed,
        has_grammars=model.has_grammars,
    )


def landing_place(
    config: Config, model: LoadedModel, incarnation: Incarnation, connector: NodeConnector
) -> LandingPlace:
    """Return where KV of other nodes lands on this one."""
    return LandingPlace(
        node=incarnation,
        kv_endpoint=connector.endpoint,
        fingerprint=model.layout.fingerprint,
        kv_description=kv_description(config, model),
        layer_bytes=tuple(one.num_bytes for one in model.layout.layers),
        lease_s=config.handoff.lease_s,
    )


def kv_description(config: Config, model: LoadedModel) -> str:
    """Describe the layout of the node's KV cache, for messages about layouts that differ."""
    has_mtp = config.speculation.speculative_method == "mtp"
    return f"{model.layout.description}, {'with' if has_mtp else 'without'} mtp"


def advertised_host(server: ServerConfig) -> str:
    """Return the name or address under which others reach what the node listens on."""
    if server.advertise_host:
        return server.advertise_host
    return _reachable(server.host)


def advertised_kv_host(server: ServerConfig) -> str:
    """Return the name or address under which other nodes reach the KV port."""
    if server.kv_advertise:
        return server.kv_advertise
    return _reachable(server.kv_host) if server.kv_host else advertised_host(server)


def _reachable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104


def log_loaded_model(config: Config, model: LoadedModel) -> None:
    """Log what configuration and checkpoint resulted in: cache, lengths, drafts, scheduling."""
    speculation = speculation_of(config)
    most = num_speculative_tokens(
        speculation.speculative_method, speculation.num_speculative_tokens
    )
    log.info(
        "%s: %d blocks, sequences of up to %d tokens, %s",
        kv_description(config, model),
        model.num_blocks,
        model.max_model_len,
        f"at most {most} drafts by {speculation.speculative_method}" if most else "no drafts",
    )
    settings = asdict(config.scheduling)
    log.info("scheduling: %s", ", ".join(f"{key}={value}" for key, value in settings.items()))
