"""A stand-in for `pdserve serve`: the processes of a cluster without a model.

A node says that it lives by a file in the shared folder; the router lists those files. Behaviour
is chosen by files there too: `<name>.fails` makes a process exit with what the file says, and
`<name>.compiles` log what it says, and be ready when it is gone.
Usage: fake_role.py SHARED_FOLDER CONFIG_FILE
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import tomllib
from pathlib import Path


def main() -> None:
    shared, config_path = Path(sys.argv[1]), Path(sys.argv[2])
    config = tomllib.loads(config_path.read_text())
    name = config["server"]["node_id"]
    (shared / f"{name}.toml").write_text(config_path.read_text())
    if (reason := shared / f"{name}.fails").exists():
        sys.exit(reason.read_text())
    stopped = threading.Event()
    if (shared / f"{name}.stubborn").exists():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        # Not set() itself: the handler may interrupt the very wait that holds the event's lock.
        signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    # What drains a real role, which may take long.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config["role"] == "router":
        # Its modules take as long to import as everything else of a stand-in, and nodes are many.
        from tests.integration.fake_router import serve

        serve(shared, config["api"]["api_key"], config["server"]["host"], config["server"]["port"])
    print(f"{name} runs", flush=True)
    epoch = shared / f"{name}.epoch"
    last = int(epoch.read_text()) if epoch.exists() else 0
    epoch.with_suffix(".next").write_text(str(last + 1))
    epoch.with_suffix(".next").rename(epoch)
    if (slow := shared / f"{name}.compiles").exists():
        for line in slow.read_text().splitlines():
            print(line, flush=True)
        while slow.exists():
            stopped.wait(0.05)
    ready = shared / f"{name}.ready"
    ready.with_suffix(".tmp").write_text(str(os.getpid()))
    ready.with_suffix(".tmp").rename(ready)
    stopped.wait()


if __name__ == "__main__":
    main()
