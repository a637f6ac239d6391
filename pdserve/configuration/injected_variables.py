"""The variables that Kubernetes puts into every container of a namespace: they are no settings.

A Service named `pdserve-router` adds PDSERVE_ROUTER_SERVICE_HOST, PDSERVE_ROUTER_SERVICE_PORT,
PDSERVE_ROUTER_SERVICE_PORT_HTTP, PDSERVE_ROUTER_PORT=tcp://10.0.0.7:8000,
PDSERVE_ROUTER_PORT_8000_TCP, and four variables that begin with the last one. A Service named
`pdserve` adds PDSERVE_PORT=tcp://10.0.0.7:8000, which has the name of a setting.
"""

from __future__ import annotations

import re

_BY_NAME = re.compile(
    r"PDSERVE_([A-Z0-9_]+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_PORT = re.compile(r"PDSERVE_([A-Z0-9_]+_)?PORT")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def is_injected(name: str, value: str) -> bool:
    """Return whether Kubernetes made this variable for a Service."""
    if _BY_NAME.fullmatch(name):
        return True
    return _PORT.fullmatch(name) is not None and _ADDRESS.match(value) is not None
