"""`pdserve up` with a stand-in for each role: fake_cluster.py SHARED_FOLDER PORT FLAGS

The flags are those of `up` that are no settings.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common.nodes import Role
from pdserve.configuration.config_sources import Command, load_config
from pdserve.configuration.flags import SET_BY_UP, UP_DEFAULTS, build_parser
from pdserve.local_cluster.cluster_plan import ClusterSize
from pdserve.local_cluster.local_cluster import run_local_cluster

FAKE_ROLE = Path(__file__).with_name("fake_role.py")


def main() -> int:
    shared, port = Path(sys.argv[1]), sys.argv[2]
    command = Command(name="pdserve up", defaults=UP_DEFAULTS, own_keys=SET_BY_UP)
    flags, unknown = build_parser().parse_known_args(["up", *sys.argv[3:]])
    assert not unknown
    log_folder = getattr(flags, "log_folder", None)
    loaded = load_config(
        {"port": port, "model": "demo"}, [], os.environ, command=command, role=Role.ROUTER
    )
    return run_local_cluster(
        loaded.config,
        ClusterSize.chosen(prefill=None, decode=None, mixed=None),
        has_to_exit_after_sample=flags.exit_after_sample,
        log_folder=log_folder and Path(log_folder),
        restarts_nodes=flags.restart_nodes,
        command_for=lambda config: [sys.executable, str(FAKE_ROLE), str(shared), str(config)],
        resolve_model=lambda _: Path("/models/fake"),
    )


if __name__ == "__main__":
    sys.exit(main())
