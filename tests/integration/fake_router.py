"""The HTTP side of a stand-in for a router, whose nodes are files in a shared folder."""

from __future__ import annotations

import json
import threading
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


def serve(shared: Path, api_key: str, host: str, port: int) -> None:
    """Answer requests on a thread of its own for as long as this process lives."""
    FakeRouter.shared, FakeRouter.api_key = shared, api_key
    server = ThreadingHTTPServer((host, port), FakeRouter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
