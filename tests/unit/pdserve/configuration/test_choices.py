"""The choices that a setting declares are exactly those that the code has."""

from __future__ import annotations

import pytest

from common.kv.kv_layout import DTYPE_BYTES, STORED_BYTES
from engine.core.policies.reservation import RESERVATION_POLICIES
from engine.core.policies.victims import VICTIM_ORDERS
from engine.runner.weights.stored_formats import QUANTISERS
from kv_transfer.shared.lanes import LANES_BY_SPEED, VERIFY_AUTO, VERIFY_MODES
from pdserve.configuration.options import all_options
from router.api.prefix_sharing import PrefixSharing
from router.core.policies import POLICIES
from router.tools.formats import FORMATS

# The loopback lane joins two nodes of one process, which no command starts. Where a card has the
# cache, `rdma` asks for the other lane by RDMA.
NETWORK_LANES = [lane for lane in LANES_BY_SPEED if lane not in ("loopback", "rdma_read")]


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("placement_policy", POLICIES),
        ("reservation_policy", RESERVATION_POLICIES),
        ("preemption_policy", VICTIM_ORDERS),
        ("kv_transport", ["auto", *NETWORK_LANES]),
        ("kv_verify", [VERIFY_AUTO, *VERIFY_MODES]),
        ("dtype", ["auto", *DTYPE_BYTES]),
        ("prefix_sharing", list(PrefixSharing)),
        ("tool_format", ["auto", *FORMATS]),
        ("quantization", ["none", *(name.lower() for name in QUANTISERS)]),
        # A model in float16 has KV in float16, by auto; the CPU kernels have no such slots.
        ("kv_cache_dtype", ["auto", *(kind for kind in STORED_BYTES if kind != "float16")]),
    ],
)
def test_the_choices_are_those_of_the_code(key: str, known: list[str]) -> None:
    assert all_options()[key].declared.one_of == tuple(known)


def test_every_default_obeys_its_rule() -> None:
    for option in all_options().values():
        has_default = option.key not in ("role", "model")
        assert option.declared.accepts(option.default) == has_default, option.key
