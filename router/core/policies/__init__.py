"""Placement policies by name: each is one pure function in its own file."""

from __future__ import annotations

from router.core.policies.least_loaded import least_loaded
from router.core.policies.prefix_affinity import prefix_affinity
from router.core.policies.query import Policy
from router.core.policies.round_robin import round_robin

POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "prefix_affinity": prefix_affinity,
}
