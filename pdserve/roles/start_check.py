"""Checks of `check-config` beside the settings: the files, folders and sizes that they name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.files.keys_folder import load_keys
from common.model_names import KNOWN_MODELS
from common.nodes import Role
from common.settings.config import Config
from engine.runner.memory_meter import HostMeter
from pdserve.checkpoints.resolve import resolve_checkpoint
from pdserve.roles.usable import check_usable
from placement.redis_store import RedisStore


def check_start(config: Config) -> str:
    """Raise `ConfigError` or `CheckpointError` as `serve` would with this configuration, and for
    what the role could not use of this machine.

    Returns what it cannot use for now, in words. Nothing is connected or allocated, nothing is
    left on a disk, and a model that has a name is not fetched.
    """
    security = config.security
    keys = load_keys(Path(security.keys), config.role) if security.keys else None
    RedisStore(config.placement.redis_url, config.placement.cluster, keys=keys)
    model = None
    if config.model.model not in KNOWN_MODELS:
        model = replace(config.model, model=str(resolve_checkpoint(config.model.model)))
    if config.role is Role.ROUTER:
        from pdserve.roles.router_role import check_router

        check_router(config, model, keys)
    else:
        if kv_key := config.handoff.kv_key:
            from kv_transfer.zmq.curve_keys import load_curve_keys

            load_curve_keys(Path(kv_key))
        if model is not None:
            from engine.runner.start.load import checked_checkpoint

            checked_checkpoint(model)
    return check_usable(config, 1, HostMeter().memory())
