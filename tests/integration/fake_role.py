"""A stand-in for `pdserve serve`: the processes of a cluster without a model.

A node says that it lives by a file in the shared folder; the router lists those files. Behaviour
is chosen by files there too: `<name>.fails` makes a process exit with what the file says, and
`<name>.compiles` log what it says, and be ready when it is gone.
Usage: fake_role.py SHARED_FOLDER CONFIG_FILE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWER = ("Paris is ", "the capital ", "of France.")


class FakeRouter(BaseHTTPRequestHandler):
    shared: Path
    api_key: str

    def do_GET(self) -> None:
        if self.path == "/v1/cluster":
            lives = {path.stem: path for path in self.shared.glob("*.epoch")}
            names = sorted(path.stem for path in self.shared.glob("*.ready"))
            nodes = [
                {
                    "node_id": name,
                    "role": name.split("-")[0],
                    "epoch": int(lives[name].read_text()),
                }
                for name in names
            ]
            self._send({"nodes": nodes})
        elif self.path == "/v1/models":
            self._send({"data": [{"id": "fake-model"}]})
        else:
            self._send({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        wanted = f"Bearer {self.api_key}" if self.api_key else ""
        if self.headers.get("Authorization", "") != wanted:
            self._send({"error": {"message": "a wrong key"}}, 401)
            return
        said = self.shared / "answer.says"
        texts = [json.loads(f'"{said.read_text()}"')] if said.exists() else ANSWER
        events: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
        if (self.shared / "answer.fails").exists():
            events[1:] = [{"error": {"message": "the decode node is gone"}}]
        else:
            events.append({"choices": [], "usage": {"completion_tokens": 3}})
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, body: Any, status: int = 200) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        pass


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
        FakeRouter.shared = shared
        FakeRouter.api_key = config["api"]["api_key"]
        server = ThreadingHTTPServer(
            (config["server"]["host"], config["server"]["port"]), FakeRouter
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
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
