"""`pdserve serve` that cannot start: an exit code, and one line that names what is wrong.

All of them start side by side, once; each test then looks at one. They are forks: `test_cli` has
starts of their own.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pdserve.cli import main
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.cluster.forked_serve import ForkedServe
from tests.support.cluster.processes import SOURCES, role_environment
from tests.support.models.hub_formats import Gptq, packed_model, write_tensors
from tests.support.models.tiny_model import make_tiny_model, tiny_config, tiny_weights, write_json
from tests.support.models.tokenizer_gguf import write_tiny_gguf
from tests.support.stores.redis_server import RedisServer

END_TIMEOUT_S = 150.0
GGUF = "model.gguf"
UP = "model.layers.1.mlp.up_proj"
Break = Callable[[Path], object]


def cut_the_weights_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_the_header_short(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def lose_a_shard(folder: Path) -> None:
    names = tiny_weights(7)
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", index)


def change_a_shape(folder: Path) -> None:
    write_json(folder / "config.json", tiny_config() | {"intermediate_size": 192})


def change_a_dtype(folder: Path) -> None:
    weights = tiny_weights(7)
    name = f"{UP}.weight"
    weights[name] = weights[name].astype(np.int8)
    save_file(weights, folder / "model.safetensors")


def change_the_architecture(folder: Path) -> None:
    write_json(folder / "config.json", tiny_config() | {"architectures": ["GPT2LMHeadModel"]})


def claim_three_bits(folder: Path) -> None:
    change_quantization(folder, {"bits": 3})


def lose_the_scales(folder: Path) -> None:
    change_quantization(folder, {}, f"{UP}.scales")


def change_quantization(folder: Path, keys: dict[str, object], lost: str = "") -> None:
    """Write GPTQ weights, with other keys in config.json or without one tensor."""
    packer = Gptq(group_size=32)
    tensors, _ = packed_model(tiny_weights(7), packer)
    tensors.pop(lost, None)
    write_tensors(folder / "model.safetensors", tensors)
    config = tiny_config() | {"quantization_config": packer.config() | keys}
    write_json(folder / "config.json", config)


def cut_a_gguf_file_short(folder: Path) -> None:
    path = write_tiny_gguf(folder / GGUF)
    path.write_bytes(path.read_bytes()[:-1000])


def claim_tensors_without_end(folder: Path) -> None:
    (folder / GGUF).write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0))


def claim_a_huge_tensor(folder: Path) -> None:
    described = struct.pack("<QQQ1sIQQIQ", 1, 0, 1, b"t", 2, 32, 1 << 50, 2, 0)
    (folder / GGUF).write_bytes(b"GGUF" + struct.pack("<I", 3) + described)


@dataclass(frozen=True, slots=True)
class Case:
    """A folder that is broken in one way, flags, and what must come of it."""

    exit_code: int
    words: tuple[str, ...]
    break_folder: Break | None = None
    flags: tuple[str, ...] = ()
    role: str = "mixed"


IN_USE, REDIS_PORT, FOLDER = "{port in use}", "{port of Redis}", "{folder}"
IN_GGUF = ("--model", f"{FOLDER}/{GGUF}")
PASSWORD_URL = f"redis://:wrong@127.0.0.1:{REDIS_PORT}/0"
OTHER_URL = f"redis://127.0.0.1:{REDIS_PORT}/9999"
CASES: dict[str, Case] = {
    "truncated weights": Case(1, ("model.safetensors", "truncated"), cut_the_weights_short),
    "truncated header": Case(1, ("model.safetensors", "truncated"), cut_the_header_short),
    "missing shard": Case(1, ("model-00001-of-00002.safetensors", "missing"), lose_a_shard),
    "wrong shape": Case(1, ("mlp", "shape", "192"), change_a_shape),
    "wrong dtype": Case(1, ("mlp.up_proj.weight", "I8", "F32"), change_a_dtype),
    "architecture": Case(1, ("GPT2LMHeadModel", "LlamaForCausalLM"), change_the_architecture),
    "three bits": Case(1, ("quantization_config.bits is 3", "wanted 4 or 8"), claim_three_bits),
    "no scales": Case(1, (f"{UP}.scales is missing", "[2, 128]"), lose_the_scales),
    "truncated GGUF file": Case(
        1, (GGUF, "not a whole GGUF file", "bytes"), cut_a_gguf_file_short, IN_GGUF
    ),
    "router's truncated GGUF file": Case(
        1, (GGUF, "not a whole GGUF file"), cut_a_gguf_file_short, IN_GGUF, role="router"
    ),
    "GGUF file of endless tensors": Case(
        1, (GGUF, "not a whole GGUF file"), claim_tensors_without_end, IN_GGUF
    ),
    "GGUF file of a huge tensor": Case(
        1, (GGUF, "tensor t needs", "bytes"), claim_a_huge_tensor, IN_GGUF
    ),
    "no folder": Case(1, ("/nowhere",), flags=("--model", "/nowhere")),
    "no tokenizer": Case(
        1, ("tokenizer.json",), lambda folder: (folder / "tokenizer.json").unlink(), role="router"
    ),
    "port in use": Case(2, (IN_USE, "in use"), flags=("--port", IN_USE)),
    "router's port in use": Case(2, (IN_USE, "in use"), flags=("--port", IN_USE), role="router"),
    "kv port in use": Case(2, (IN_USE, "in use"), flags=("--kv-port", IN_USE)),
    "wrong password": Case(1, ("Redis", "password"), flags=("--redis-url", PASSWORD_URL)),
    "router's wrong password": Case(
        1, ("Redis", "password"), flags=("--redis-url", PASSWORD_URL), role="router"
    ),
    "no such database": Case(1, ("DB index", "--redis-url"), flags=("--redis-url", OTHER_URL)),
    "router's no such database": Case(
        1, ("DB index", "--redis-url"), flags=("--redis-url", OTHER_URL), role="router"
    ),
    "no RDMA device": Case(
        2,
        ("kv_transport is rdma", "nosuch0", "auto"),
        flags=("--kv-transport", "rdma", "--rdma-devices", "nosuch0"),
        role="decode",
    ),
    "no KV key": Case(2, ("kv_key /nowhere", "pdserve kv-key"), flags=("--kv-key", "/nowhere")),
    "no keys": Case(
        2, ("host is '0.0.0.0'", "pdserve keys init", "--insecure"), flags=("--host", "0.0.0.0")
    ),
    "keys nowhere": Case(2, ("'/nowhere'", "pdserve keys init"), flags=("--keys", "/nowhere")),
    "hub id": Case(1, ("hf download Qwen/Qwen3-0.6B",), flags=("--model", "Qwen/Qwen3-0.6B")),
    "equal ports": Case(
        2, ("kv_port is 7001, as port is",), flags=("--port", "7001", "--kv-port", "7001")
    ),
    "equal metrics port": Case(
        2,
        ("metrics_port is 7001, as port is",),
        flags=("--port", "7001", "--metrics-port", "7001"),
        role="prefill",
    ),
    "no certificate": Case(
        2,
        ("/nowhere",),
        flags=("--tls-cert", "/nowhere", "--tls-key", "/nowhere"),
        role="router",
    ),
    "router's keys nowhere": Case(
        2, ("'/nowhere'", "pdserve keys init"), flags=("--keys", "/nowhere"), role="router"
    ),
    "router's too long a context": Case(
        2, ("max_model_len", "99999", "32768"), flags=("--max-model-len", "99999"), role="router"
    ),
    "no tool template": Case(
        2, ("/nowhere",), flags=("--tool-template", "/nowhere"), role="router"
    ),
    "too long a context": Case(
        2, ("max_model_len", "99999", "32768"), flags=("--max-model-len", "99999")
    ),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended."""

    exit_code: int
    said: str
    facts: dict[str, str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, cluster_redis: RedisServer) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("broken")
    sound = make_tiny_model(folder / "sound")
    with contextlib.ExitStack() as cleanup:
        taken = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
        facts = {IN_USE: str(taken.getsockname()[1]), REDIS_PORT: str(cluster_redis.port)}
        running = {}
        for number, (name, case) in enumerate(CASES.items()):
            model = folder / str(number)
            shutil.copytree(sound, model)
            if case.break_folder is not None:
                case.break_folder(model)
            running[name] = start(case, model, cluster_redis.url, facts)
            cleanup.callback(running[name].kill)
        return {
            name: end(process, folder / f"{number}.log", facts)
            for number, (name, process) in enumerate(running.items())
        }


def start(case: Case, model: Path, redis_url: str, facts: dict[str, str]) -> ForkedServe:
    """Start a role that writes its log beside the folder `model`."""
    flags = [facts.get(flag, flag).replace(REDIS_PORT, facts[REDIS_PORT]) for flag in case.flags]
    flags = [flag.replace(FOLDER, str(model)) for flag in flags]
    if "--port" not in flags:
        flags += ["--port", str(free_loopback_port())]
    # A folder that is begun for a file leaves its lock in the cache.
    cache = {"PDSERVE_CACHE": str(model / "cache")} if case.flags == IN_GGUF else {}
    shared = ["--model", str(model), "--redis-url", redis_url, "--cluster", "broken"]
    shared += ["--kv-cache-memory", "1MiB", "--num-threads", "1"]
    return ForkedServe(
        ["--role", case.role, *shared, *flags],
        model.with_suffix(".log"),
        role_environment() | cache,
        SOURCES,
    )


def end(process: ForkedServe, log: Path, facts: dict[str, str]) -> Ended:
    return Ended(process.wait(END_TIMEOUT_S), log.read_text(), facts)


@pytest.mark.parametrize("name", CASES)
def test_it_ends_with_a_line_that_says_why(ended: dict[str, Ended], name: str) -> None:
    case, how = CASES[name], ended[name]
    said = [line for line in how.said.splitlines() if line.startswith("pdserve: ")]
    assert len(said) == 1, how.said
    assert "Traceback" not in how.said
    for word in case.words:
        assert how.facts.get(word, word) in said[0]
    assert how.exit_code == case.exit_code, said[0]


# What a running machine says: who listens, who may connect, which devices it has.
ONLY_AT_A_START = ("port in use", "wrong password", "no such database", "RDMA device")


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(ONLY_AT_A_START)])
def test_check_config_refuses_it_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case, model = CASES[name], make_tiny_model(tmp_path / "model")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    arguments = ["check-config", "--role", case.role, "--model", str(model)]
    assert main(arguments) == 0
    capsys.readouterr()
    if case.break_folder is not None:
        case.break_folder(model)
    flags = [flag.replace(FOLDER, str(model)) for flag in case.flags]
    assert main([*arguments, *flags]) == case.exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    for word in case.words:
        assert word in shown.err


def test_nothing_of_them_is_left_in_redis(
    ended: dict[str, Ended], cluster_redis: RedisServer
) -> None:
    assert [key for key in cluster_redis.keys("pdserve:broken:") if ":epoch:" not in key] == []
