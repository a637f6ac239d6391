"""A cluster to measure: `pdserve up` as a process of its own, and a streaming client for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from common.observing.latency import RequestTiming
from pdserve.local_cluster.free_ports import free_loopback_port

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One request: prompt and output lengths in tokens; the prompt's words depend on `seed`."""

    num_prompt_tokens: int
    num_output_tokens: int
    seed: int

    def body(self) -> dict[str, object]:
        """Return what a completion request asks that runs to its full length."""
        prompt = [
            (7919 * (i + 1) + 104729 * (self.seed + 1)) % 30000 + 3
            for i in range(self.num_prompt_tokens)
        ]
        return {
            "prompt": prompt,
            "max_tokens": self.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. `token_ids` are there if the request asked for them."""

    timing: RequestTiming
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int


class RunningCluster:
    """A client of a router that is ready."""

    def __init__(self, client: httpx.AsyncClient, model: str, pid: int = 0) -> None:
        self._client = client
        self._model = model
        self.pid = pid
        """The process that started it; 0 where this one did not."""

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """Return what the router shows of each node, by node id."""
        shown = (await self._client.get("/v1/cluster")).json()
        return {node["node_id"]: node for node in shown["nodes"]}

    async def metrics(self) -> dict[str, float]:
        """Return the samples of the router's metrics, by name and labels as they are written."""
        return samples_of((await self._client.get("/metrics")).text)

    async def prefill_metrics(self) -> list[str]:
        """Return where the prefill and mixed nodes show their metrics."""
        shown = (await self._client.get("/v1/cluster/targets")).raise_for_status().json()
        nodes = [one for one in shown if one["labels"]["role"] != "decode"]
        return [address for one in nodes for address in one["targets"]]

    async def metric(self, name: str) -> float:
        """Return a metric of the router that has no labels. Raises `RuntimeError` without it."""
        found = (await self.metrics()).get(name)
        if found is None:
            raise RuntimeError(f"the router has no metric {name}")
        return found

    async def timed(self, load: Load, chunks: list[float] | None = None) -> RequestTiming:
        """Send one request and record when each piece of its answer arrived.

        The times are added to `chunks` as the pieces arrive, so that others can watch the answer.
        Raises `RuntimeError` when the router refuses it or the stream fails.
        """
        return (await self.answer(load.body(), chunks=chunks)).timing

    async def answer(
        self,
        body: Mapping[str, object],
        headers: Mapping[str, str] | None = None,
        chunks: list[float] | None = None,
    ) -> Answer:
        """Send a completion request with `body` and return its answer; see `timed`.

        Where it asks for token ids, an event without any is no piece: that of the prompt's ids, and
        the last one, which has the reason of the end.

        Raises `RuntimeError` when the router refuses it or the stream fails.
        """
        arrived_at_s = time.monotonic()
        chunks = [] if chunks is None else chunks
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        asked = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        async with self._client.stream(
            "POST", "/v1/completions", json=asked | dict(body), headers=headers
        ) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {await response.aread()!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                for choice in event["choices"]:
                    found = choice.get("token_ids") or ()
                    if found or not body.get("return_token_ids"):
                        chunks.append(time.monotonic())
                    token_ids += found
                usage = event.get("usage") or usage
        return Answer(
            timing=RequestTiming(
                arrived_at_s=arrived_at_s,
                chunk_at_s=tuple(chunks),
                num_tokens=usage["completion_tokens"],
            ),
            token_ids=tuple(token_ids),
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )


def samples_of(text: str) -> dict[str, float]:
    """Return samples in Prometheus' text by name and labels as they are written."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@asynccontextmanager
async def started_cluster(
    arguments: Sequence[str], *, at_start: str = ""
) -> AsyncIterator[RunningCluster]:
    """Run `pdserve up` with `arguments` on a free port, and stop it at the end.

    Each of its processes executes the Python code `at_start` first.
    """
    port = free_loopback_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        if at_start:
            (Path(folder) / "sitecustomize.py").write_text(at_start)
        command = [sys.executable, "-m", "pdserve", "up", "--port", str(port), *arguments]
        process = _start(command, log, folder)
        try:
            async with running_cluster(url, process) as cluster:
                yield cluster
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)


@asynccontextmanager
async def running_cluster(
    url: str, process: subprocess.Popen[bytes] | None = None
) -> AsyncIterator[RunningCluster]:
    """Wait for a router at `url` and yield a client.

    Raises `RuntimeError` when it is not ready in time, or as soon as `process` has ended.
    """
    limits = httpx.Limits(max_connections=None)
    # Through a proxy that the environment names, the proxy would be measured too.
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=limits, trust_env=False
    ) as client:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not await _is_ready(client):
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"the cluster ended with {process.returncode}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{url} was not ready after {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)
        models = (await client.get("/v1/models")).json()
        pid = 0 if process is None else process.pid
        yield RunningCluster(client, models["data"][0]["id"], pid)


def _start(command: list[str], log: IO[str], folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=_environment(folder),
    )


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        if (await client.get("/ready")).status_code != 200:
            return False
        nodes = (await client.get("/v1/cluster")).json()["nodes"]
    except httpx.TransportError:
        return False
    roles = {node["role"] for node in nodes}
    return "mixed" in roles or {"prefill", "decode"} <= roles


def _environment(folder: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((folder, root))}
