"""`pdserve up` with a stand-in for each role: fake_cluster.py SHARED_FOLDER PORT FLAGS

The flags are those of `up` that are no settings. It is forked, or, where variables are to be read
by Python itself, started as a program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from common.nodes import Role
from pdserve.__main__ import open_standard_streams
from pdserve.configuration.config_sources import Command, load_config
from pdserve.configuration.flags import SET_BY_UP, UP_DEFAULTS, build_parser
from pdserve.local_cluster.cluster_plan import ClusterSize
from pdserve.local_cluster.local_cluster import run_local_cluster
from tests.support.cluster.forked_serve import FORKS, Forked, become
from tests.support.templates import FORKED, Template

UPS = Template((__name__, *FORKED))
FAKE_ROLE = Path(__file__).with_name("fake_role.py")


def main(arguments: Sequence[str]) -> int:
    """Run the cluster until it is stopped; return the exit code."""
    shared, port = Path(arguments[0]), arguments[1]
    command = Command(name="pdserve up", defaults=UP_DEFAULTS, own_keys=SET_BY_UP)
    flags, unknown = build_parser().parse_known_args(["up", *arguments[2:]])
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


class FakeUp(Forked):
    """The process of such a cluster, and what it prints."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        printed, output = FORKS.Pipe(duplex=False)
        super().__init__(UPS, _run, tuple(map(str, arguments)), output, dict(environ))
        output.close()
        self.stdout = os.fdopen(os.dup(printed.fileno()))
        printed.close()


def _run(arguments: Sequence[str], output: Connection, environ: Mapping[str, str]) -> None:
    become(output.fileno(), environ)
    output.close()
    sys.exit(main(arguments))


if __name__ == "__main__":
    open_standard_streams()
    sys.exit(main(sys.argv[1:]))
