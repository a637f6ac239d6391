"""A cluster on a folder without weights: its shape and its tokenizer are enough."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from pdserve.cli import main
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.integration.running_up import running_up
from tests.support.models.tiny_model import make_tiny_model

WORDS = "config.json says: answers mean nothing"


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_file_that_has_no_weights_is_not_read(tmp_path: Path, role: str) -> None:
    folder = make_tiny_model(tmp_path / "shape")
    (folder / "model.safetensors").write_bytes(b"no weights")
    flags = ["check-config", "--role", role, "--model", str(folder)]
    assert main([*flags, "--load-format", "random"]) == 0
    assert (main(flags) == 0) == (role == "router")


def test_a_chat_with_random_weights(tmp_path: Path) -> None:
    """Files of weights are not wanted."""
    folder = make_tiny_model(tmp_path / "shape")
    logs = tmp_path / "logs"
    (folder / "model.safetensors").unlink()
    port = free_loopback_port()
    flags = ("--model", str(folder), "--load-format", "random", "--log-folder", str(logs))
    small = ("--mixed", "1", "--kv-cache-memory", "16MiB")
    with running_up(tmp_path, *flags, *small, "--port", str(port)) as process:
        assert process.stdout is not None
        printed = ""
        while " chat --url " not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        body = {
            "model": "shape", "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Is this long enough? " * 20}],
        }  # fmt: skip
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answers = [httpx.post(url, json=body, timeout=60).json() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, process.stdout.read()
    assert [one["usage"]["completion_tokens"] for one in answers] == [8, 8]
    assert len({one["choices"][0]["message"]["content"] for one in answers}) == 1
    assert WORDS in next(logs.glob("mixed-1*")).read_text()
