"""All tests; what several folders of them share is in `support`."""

from __future__ import annotations

import os

# Clients of many libraries would ask a proxy of the environment for servers of this machine.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), "127.0.0.1,localhost,::1"]))
