"""A decode node that tells prefill nodes another KV endpoint than its own: that of a relay."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

_ENDPOINT = "KV_ENDPOINT_OF_THE_TEST"
_TELL_IT = f"""
    import os

    from kv_transfer.zmq.transport import ZmqTransport

    ZmqTransport.endpoint = property(lambda self: os.environ["{_ENDPOINT}"])
"""


def environ_of_endpoint(folder: Path, endpoint: str) -> dict[str, str]:
    """Return the variables of a node whose KV endpoint others reach at `endpoint`.

    Writes into `folder`, which must outlive the node.
    """
    (folder / "sitecustomize.py").write_text(textwrap.dedent(_TELL_IT))
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, _ENDPOINT: endpoint}
