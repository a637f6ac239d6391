"""The settings of what a router does with the load of its cluster."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings.setting import Section, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig(Section):
    """Nodes whose roles follow the load."""

    auto_roles: bool = setting(
        False,
        "a router gives prefill and decode nodes the other role when the load wants it",
        note="one of all routers that have this does so at a time",
    )
    target_ttft_s: float = setting(
        2.0,
        "time to the first token that the cluster is meant to keep",
        note="for auto_roles and GET /v1/scaling",
        unit="seconds",
        between=(0.01, 3600),
    )
    target_tpot_s: float = setting(
        0.1,
        "time per output token that the cluster is meant to keep",
        note="for auto_roles and GET /v1/scaling",
        unit="seconds",
        between=(0.001, 3600),
    )
