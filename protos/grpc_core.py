"""What the core of gRPC reads from the environment when it is loaded.

Import nothing of gRPC here: what is set later has no effect.
"""

from __future__ import annotations

import os

from common.nodes import Role

ROUTER_EXPERIMENTS = "-event_engine_client"
"""A router reads its nodes' sockets on the thread that waits for completed calls. By default gRPC
reads them on threads of its own, which then wake that one: each message woke two threads more, and
a request cost a router 15 % more CPU time."""


def set_up_grpc(role: Role, log_format: str) -> None:
    """Choose the threads of the core and silence it, unless the environment says otherwise.

    The core does not use Python's loggers, so its lines would have another form. What they report
    is also reported to the caller.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE" if log_format == "json" else "ERROR")
    if role is Role.ROUTER:
        os.environ.setdefault("GRPC_EXPERIMENTS", ROUTER_EXPERIMENTS)
