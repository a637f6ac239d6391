"""What `pdserve up` opens on a machine, and what another user of that machine can do with it.

Each row of the table in SECURITY.md is a test. The attacks run in processes of the user nobody,
against a cluster that root has started with an umask that forbids nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from common.files.keys_folder import load_keys
from common.nodes import NodeRecord, Role
from kv_transfer.zmq.curve_keys import load_curve_keys, new_curve_keys
from placement.records import decode_node
from tests.support.cluster.books import NodeBooks
from tests.support.cluster.processes import SOURCES, role_environment
from tests.support.cluster.serving_up import serving_up
from tests.support.key_folders import make_keys
from tests.support.observing.listeners import listening_sockets
from tests.support.observing.process_tasks import process_tree

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

NOBODY = 65534
OTHER_USER = SOURCES / "tests/support/attacks/other_user.py"
API_KEY = "pds_secret-of-the-owner"
MARK = "a-word-of-somebody's-request"
NODES = ("prefill-1", "decode-1")
LET_IN = {"done", "let in", "spoken to", "drained", "listens"}


@dataclass(frozen=True, slots=True)
class Up:
    """A running `pdserve up`; `temporary` is the folder in which it keeps what it writes."""

    pid: int
    port: int
    temporary: Path
    records: Mapping[str, NodeRecord]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def folder(self) -> Path:
        (folder,) = self.temporary.glob("pdserve-*")
        return folder

    @property
    def keys(self) -> Path:
        return self.folder / "private/keys"

    def kv_address(self, node_id: str) -> str:
        """What a node listens on besides its other two ports."""
        record = self.records[node_id]
        others = {f"tcp {one}" for one in (record.control_address, record.metrics_address)}
        (kv,) = set(listening_sockets(self.children()[node_id])) - others
        return kv.removeprefix("tcp ")

    def children(self) -> dict[str, int]:
        """Every process by its name, `up` among them; a planning process is `planner`."""
        named = {}
        for pid in process_tree(self.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                is_redis = Path(f"/proc/{pid}/exe").readlink().name == "redis-server"
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            config = next((Path(word).stem for word in words if word.endswith(".toml")), "planner")
            named["up" if pid == self.pid else "redis" if is_redis else config] = pid
        return named


@pytest.fixture(scope="module")
def up(tiny_model: Path) -> Iterator[Up]:
    temporary = Path(tempfile.mkdtemp(prefix="of-all-"))
    temporary.chmod(0o1777)
    numba = Path(role_environment().get("PDSERVE_CACHE") or Path.home() / ".cache/pdserve")
    environ = {"PDSERVE_CACHE": str(temporary / "cache")}
    if "NUMBA_CACHE_DIR" not in role_environment():
        environ["NUMBA_CACHE_DIR"] = str(numba / "numba")
    try:
        with serving_up(temporary, tiny_model, environ=environ, cwd=SOURCES, umask=0) as up:
            # A body that is planned in a process of its own, which the router starts for it.
            large = {"model": "tiny", "prompt": "word " * 40_000}
            httpx.post(f"http://127.0.0.1:{up.port}/v1/completions", json=large, timeout=60)
            yield Up(up.pid, up.port, temporary, _records(temporary))
        assert [path.name for path in temporary.iterdir()] == ["cache"]
    finally:
        shutil.rmtree(temporary)


def _records(temporary: Path) -> dict[str, NodeRecord]:
    (private,) = temporary.glob("pdserve-*/private")
    keys = load_keys(private / "keys/router", Role.ROUTER)
    path, password = str(private / "redis.sock"), keys.redis_password
    with redis.Redis(unix_socket_path=path, username=keys.redis_user, password=password) as client:
        values = {name: client.get(f"pdserve:default:node:{name}") for name in NODES}
    return {name: decode_node(value).record for name, value in values.items()}


def attack(name: str, *arguments: Mapping[str, Any], user: int = NOBODY) -> list[Any]:
    """What came of each attack as another user."""
    done = subprocess.run(
        [sys.executable, str(OTHER_USER), str(user), name, json.dumps(arguments)],
        env={**role_environment(), "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    results: list[Any] = json.loads(done.stdout)
    assert len(results) == len(arguments)
    return results


def test_these_are_all_its_listeners(up: Up) -> None:
    """A port or socket that is added has to be added to SECURITY.md and to the attacks below."""
    names = {name: listening_sockets(pid) for name, pid in up.children().items()}
    assert {name: names.pop(name) for name in ("up", "redis", "router")} == {
        "up": [],
        "redis": [f"unix {up.folder}/private/redis.sock"],
        "router": [f"tcp {up.address}"],
    }
    assert names.pop("planner") == []
    assert names.keys() == set(NODES)
    for node_id in NODES:
        control, metrics = (
            up.records[node_id].control_address,
            up.records[node_id].metrics_address,
        )
        known = {f"tcp {one}" for one in (control, metrics, up.kv_address(node_id))}
        assert set(names[node_id]) == known
        assert all(name.startswith("tcp 127.0.0.1:") for name in known)


# --- files ----------------------------------------------------------------------------------------


def test_nothing_that_it_writes_can_be_read_or_changed(up: Up) -> None:
    paths = [up.folder, *up.folder.rglob("*")]
    assert {path.name for path in paths} >= {"redis.sock", "admin.key", "router.toml", "redis.log"}
    results = attack("try_file", *({"path": str(path)} for path in paths))
    for path, outcomes in zip(paths, results, strict=True):
        # Anybody may put a file beside a folder in a folder of temporary files.
        done = {what for what, outcome in outcomes.items() if outcome == "done"}
        assert done <= ({"put a file beside"} if path == up.folder else set()), path
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    wrong = {p: oct(m) for p, m in modes.items() if m & 0o077 and p.suffix != ".pem"}
    assert wrong == {}


def test_its_caches_can_be_read_and_not_changed(up: Up) -> None:
    caches = [up.temporary / "cache", *(up.temporary / "cache").rglob("*")]
    assert len(caches) > 3
    for path, outcomes in zip(
        caches, attack("try_file", *({"path": str(path)} for path in caches)), strict=True
    ):
        done = {what for what, outcome in outcomes.items() if outcome == "done"}
        beside = {"put a file beside"} if path == caches[0] else set()
        assert done <= {"read", "list"} | beside, path


def test_shared_memory_has_no_name(up: Up) -> None:
    inodes = set()
    for pid in up.children().values():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(fd.readlink())
            except FileNotFoundError:  # closed meanwhile
                continue
            assert not target.startswith("/dev/shm"), target
            inodes |= {target} if target.startswith("/memfd:pdserve-kv") else set()
    assert inodes, "the nodes share no memory: nothing was tried"


def test_its_processes_cannot_be_looked_into(up: Up) -> None:
    """That covers descriptors of the shared memory, of the planner's pipe and of the sockets."""
    children = up.children()
    results = attack("try_process", *({"pid": pid} for pid in children.values()))
    for name, outcomes in zip(children, results, strict=True):
        assert set(outcomes.values()) <= {"PermissionError", "FileNotFoundError"}, name
        # Where /proc hides what others run (hidepid), nothing is there. The process is.
        assert outcomes["fds"] == outcomes["environ"]
        assert outcomes["signal"] == "PermissionError"


def test_no_command_line_shows_a_secret(up: Up) -> None:
    secrets = [path.read_text() for path in up.keys.rglob("*.password")]
    secrets += [path.read_text() for path in up.keys.rglob("*.token")]
    secrets += [(up.keys / f"client/{name}.key").read_text() for name in ("api", "admin")]
    secrets += [load_curve_keys(up.keys / "node/kv.key").secret.decode()]
    assert len(secrets) >= 8
    for pid in up.children().values():
        shown = Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/comm").read_text()
        assert not any(secret in shown for secret in secrets)


# --- Redis ----------------------------------------------------------------------------------------


def test_redis_is_not_reached(up: Up) -> None:
    path = str(up.folder / "private/redis.sock")
    assert attack("connect", {"address": path}) == ["PermissionError"]


# --- nodes ----------------------------------------------------------------------------------------


def test_no_node_is_drained_by_grpc(up: Up, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other")
    pairs = [("", "")]
    pairs += [
        ((other / kind / "cert.pem").read_text(), (other / kind / "key.pem").read_text())
        for kind in ("router", "node")
    ]
    for record in up.records.values():
        node = record.incarnation
        address = record.control_address
        drains = {"address": address, "node_id": node.node_id, "epoch": node.epoch}
        assert attack("drain", drains) == ["UNAVAILABLE"]
        tries = [
            {"address": address, "certificate": certificate, "key": key}
            for certificate, key in pairs
        ]
        assert not LET_IN & set(attack("handshake", *tries))
        with_ours = {
            "address": address,
            "certificate": (up.keys / "router/cert.pem").read_text(),
            "key": (up.keys / "router/key.pem").read_text(),
        }
        assert attack("handshake", with_ours) == ["spoken to"]  # the attack is one
        books = NodeBooks(record, load_keys(up.keys / "router", Role.ROUTER))
        books.read()
        books.close()


def test_no_kv_is_taken(up: Up) -> None:
    keys, others = load_curve_keys(up.keys / "node/kv.key"), new_curve_keys()
    public = keys.public.decode()
    tries = [
        {"address": up.kv_address(node_id), "server_key": key, "own": own}
        for node_id in NODES
        for key, own in (
            ("", []),
            (public, [others.public.decode(), others.secret.decode()]),
            (public, [public, keys.secret.decode()]),  # the attack is one
        )
    ]
    assert attack("send_kv", *tries) == ["refused", "refused", "let in"] * 2


def test_metrics_of_nodes_are_not_shown(up: Up) -> None:
    for record in up.records.values():
        address = record.metrics_address
        wrong = {"authorization": f"Bearer {API_KEY}"}
        tries = [
            {"method": "GET", "address": address, "path": path, "headers": headers}
            for path in ("/metrics", "//metrics", "/metrics/", "/metrics%0A", "/METRICS", "/")
            for headers in ({}, wrong)
        ]
        for reply in attack("request", *tries):
            assert reply[0] in (307, 400, 401, 404)
            assert "pdserve_" not in reply[1]
        (health,) = attack("request", {"method": "GET", "address": address, "path": "/health"})
        assert health[0] == 200
        token = (up.keys / "client/metrics.token").read_text()
        ours = httpx.get(f"http://{address}/metrics", headers={"authorization": f"Bearer {token}"})
        assert "pdserve_" in ours.text


def test_no_port_is_shared(up: Up) -> None:
    """A second listener on a port would get some of the router's connections."""
    addresses = [up.address, *map(up.kv_address, NODES)]
    for record in up.records.values():
        addresses += [record.control_address, record.metrics_address]
    assert attack("bind", *({"address": one} for one in addresses)) == ["OSError"] * len(addresses)


# --- the router's HTTP port -----------------------------------------------------------------------


def test_the_router_answers_without_a_key_and_drains_nothing(up: Up) -> None:
    """README.md promises the first; a drain needs the key that only the owner can read."""
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
    asked = {"method": "POST", "address": up.address, "path": "/v1/completions", "body": body}
    paths = ("drain", "drain%0A", "drain%0D", "drain/", "./drain", "drain;x", "DRAIN", "drain?x")
    wrong: tuple[dict[str, str], ...] = ({}, {"authorization": "Bearer pds_wrong"})
    drains = [
        {
            "method": "POST",
            "address": up.address,
            "path": f"/v1/cluster/{path}",
            "body": {"node_id": "decode-1"},
            "headers": headers,
        }
        for path in paths
        for headers in wrong
    ]
    clients = {"authorization": f"Bearer {(up.keys / 'client/api.key').read_text()}"}
    replies = attack("request", asked, *drains, {**drains[0], "headers": clients})
    assert replies[0][0] == 200, replies[0]
    assert {status for status, _ in replies[1:]} <= {307, 400, 403, 404, 405}
    assert replies[1][0] == replies[-1][0] == 403
    assert "client/admin.key" in replies[1][1]
    nodes = httpx.get(f"{up.url}/v1/cluster").json()["nodes"]
    assert [node["is_draining"] for node in nodes] == [False, False]


def test_a_user_that_reads_the_administrators_key_may_drain(up: Up) -> None:
    """The node is not there: the others are still needed."""
    command = [sys.executable, "-m", "pdserve", "drain", "nobody-1", "--url", up.url]
    environ = role_environment()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "private/keys/client/admin.key" in done.stderr
    key = ("--api-key-file", str(up.keys / "client/admin.key"))
    done = subprocess.run(
        [*command, *key], env=environ, capture_output=True, text=True, check=False
    )
    assert "there is no node 'nobody-1'" in done.stderr


def test_requests_of_others_are_not_shown(up: Up) -> None:
    """Neither by the metrics nor by the live page, whose errors might name what somebody sent."""
    wrong = httpx.post(f"{up.url}/v1/completions", json={"model": MARK, "prompt": "Hi"})
    assert MARK in wrong.text
    assert httpx.post(
        f"{up.url}/v1/completions", json={"model": "tiny", "prompt": MARK, "max_tokens": 4}
    ).is_success
    paths = ("/metrics", "/v1/live", "/v1/cluster", "/v1/cluster/targets", "/v1/models", "/")
    tries = [{"method": "GET", "address": up.address, "path": path} for path in paths]
    for path, (status, text) in zip(paths, attack("request", *tries), strict=True):
        assert status == 200, path
        assert MARK not in text, path


def test_pages_of_other_sites_are_refused(up: Up) -> None:
    foreign = ({"host": "evil.example"}, {"origin": "http://evil.example"})
    tries = [
        {"method": "GET", "address": up.address, "path": "/v1/models", "headers": one}
        for one in foreign
    ]
    assert [status for status, _ in attack("request", *tries)] == [403, 403]


# --- after all of it ------------------------------------------------------------------------------


def test_the_cluster_serves_on(up: Up) -> None:
    body = {"model": "tiny", "prompt": "Hi " * 200, "max_tokens": 2}
    reply = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
