"""Nothing listens beyond this machine without keys unless somebody said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.addresses import is_loopback
from common.nodes import Role
from pdserve.configuration.config_sources import SERVE, UP, SettingsError, load_config
from pdserve.configuration.flags import build_parser
from pdserve.configuration.shown_config import config_file_text
from pdserve.local_cluster.cluster_plan import ClusterSize, plan_cluster

LOOPBACK = ["127.0.0.1", "127.1.2.3", "localhost", "LOCALHOST", "::1"]
REACHED = ["0.0.0.0", "::", "", "10.0.0.1", "node-3", "fe80::1", "localhost.example", "128.0.0.1"]
SAFE_REDIS = ["rediss://10.0.0.1/0", "redis://127.0.0.1:6379/0", "redis://localhost", "unix:///s"]
SAFE_REDIS += ["rediss+cluster://10.0.0.1,10.0.0.2", "redis+sentinel://localhost,127.0.0.1/main"]


def problems(command: str, *arguments: str) -> list[str]:
    own = ("--role", "decode", "--model", "m") if command == "serve" else ()
    parsed, unknown = build_parser().parse_known_args([command, *own, *arguments])
    try:
        load_config(vars(parsed), unknown, {}, command=SERVE if command == "serve" else UP)
    except SettingsError as error:
        return [one for one in error.problems if "role is missing" not in one]
    return []


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_no_keys(host: str) -> None:
    assert is_loopback(host)
    assert problems("serve", "--host", host) == problems("up", "--host", host) == []


@pytest.mark.parametrize("host", REACHED)
def test_an_address_that_others_reach_needs_keys(host: str) -> None:
    assert not is_loopback(host)
    (said,) = problems("serve", "--host", host)
    assert said.startswith(f"host is {host!r}, where other machines reach it: wanted --keys")
    for hint in ("DIR/node", "pdserve keys init DIR", "--insecure", "(from flag --host)"):
        assert hint in said
    assert problems("serve", "--host", host, "--keys", "k", "--redis-url", SAFE_REDIS[0]) == []
    assert problems("serve", "--host", host, "--insecure") == []
    # One key in clear opens the API; it closes no port of a node.
    assert len(problems("serve", "--host", host, "--api-key", "x")) == 1


@pytest.mark.parametrize("host", [one for one in REACHED if one])
def test_a_kv_port_that_others_reach_needs_keys_too(host: str) -> None:
    (said,) = problems("serve", "--kv-host", host)
    assert said.startswith(f"kv_host is {host!r}, where other machines reach it: wanted --keys")
    assert problems("serve", "--kv-host", host, "--insecure") == []
    assert len(problems("serve", "--host", host, "--kv-host", host)) == 1
    keys = ("--keys", "k", "--redis-url", SAFE_REDIS[0])
    assert problems("serve", "--kv-host", host, *keys) == []
    assert problems("serve", "--kv-host", "127.0.0.1") == []


def test_a_router_is_told_of_its_own_folder() -> None:
    parsed, unknown = build_parser().parse_known_args(
        ["serve", "--role", "router", "--model", "m", "--host", "10.0.0.1"]
    )
    with pytest.raises(SettingsError, match="--keys DIR/router"):
        load_config(vars(parsed), unknown, {})


@pytest.mark.parametrize("host", REACHED)
def test_up_wants_an_api_key_where_others_reach_its_router(host: str) -> None:
    (said,) = problems("up", "--host", host)
    assert "--api-key KEY, or --insecure" in said
    assert problems("up", "--host", host, "--api-key", "x") == []
    assert problems("up", "--host", host, "--insecure") == []


@pytest.mark.parametrize("host", REACHED)
def test_an_open_api_is_one_of_this_machine(host: str) -> None:
    keys = ("--keys", "k", "--redis-url", SAFE_REDIS[0], "--open-api")
    (said,) = problems("serve", "--host", host, *keys)
    assert said.startswith(f"open_api is on, and host is {host!r}, where other machines reach it")
    assert problems("serve", "--host", host, "--insecure", *keys) == []
    assert problems("serve", "--host", "127.0.0.1", *keys) == []


@pytest.mark.parametrize("flag", ["--keys=k", "--kv-key=k", "--open-api"])
def test_up_has_keys_of_its_own(flag: str) -> None:
    name = flag.partition("=")[0]
    key = name.removeprefix("--").replace("-", "_")
    assert problems("up", flag) == [
        f"{key} cannot be set: `pdserve up` chooses it (from flag {name})"
    ]


@pytest.mark.parametrize("given", [[], ["--api-key", "x"], ["--host", "0.0.0.0", "--insecure"]])
def test_every_process_of_up_has_keys_and_its_router_is_open_without_a_key(
    given: list[str],
) -> None:
    parsed, unknown = build_parser().parse_known_args(["up", *given])
    base = load_config(vars(parsed), unknown, {}, command=UP, role=Role.DECODE).config
    size = ClusterSize(prefill=1, decode=1, mixed=1)
    router, *nodes = plan_cluster(base, size, "unix:///s", Path("keys"), num_cores=2)
    assert router.config.security.keys == "keys/router"
    assert router.config.security.open_api == ("--api-key" not in given)
    assert router.config.security.insecure == ("--insecure" in given)
    assert {node.config.security.keys for node in nodes} == {"keys/node"}


def test_files_are_encrypted_with_a_key_that_there_is() -> None:
    files = ["--prefix-host-memory=1GiB", "--prefix-disk=x", "--prefix-disk-size=1GiB"]
    wanted = ["serve", *files, "--prefix-disk-encryption"]
    (said,) = problems(*wanted)
    assert said.startswith("prefix_disk_encryption is True: wanted kv_key or keys too")
    for given in (["--kv-key=k"], ["--keys=k", "--redis-url", SAFE_REDIS[0]]):
        assert problems(*wanted, *given) == []
    assert problems("up", *files, "--prefix-disk-encryption") == []
    (said,) = problems("serve", "--prefix-disk-encryption", "--kv-key=k")
    assert said.startswith("prefix_disk_encryption is True: wanted false, because there are no")


def test_what_up_starts_passes_the_rules_of_serve() -> None:
    parsed, unknown = build_parser().parse_known_args(["up", "--host", "0.0.0.0", "--api-key", "x"])
    base = load_config(vars(parsed), unknown, {}, command=UP, role=Role.DECODE).config
    size = ClusterSize(prefill=1, decode=1, mixed=0)
    for process in plan_cluster(base, size, "unix:///s", Path("keys"), num_cores=2):
        assert SERVE.rules(process.config) == []
        is_router = process.config.role is Role.ROUTER
        assert (process.config.server.host == "0.0.0.0") == is_router
        assert "insecure = " in config_file_text(process.config)


@pytest.mark.parametrize(
    ("flags", "serves_everybody"),
    [
        ((), False),
        (("--host", "localhost"), False),
        (("--host", "::1"), False),
        (("--insecure",), True),
        (("--host", "0.0.0.0", "--api-key", "x"), False),
    ],
)
def test_the_router_of_up_guards_loopback_like_a_router_alone(
    flags: tuple[str, ...], serves_everybody: bool
) -> None:
    parsed, unknown = build_parser().parse_known_args(["up", *flags])
    base = load_config(vars(parsed), unknown, {}, command=UP, role=Role.DECODE).config
    size = ClusterSize(prefill=1, decode=1, mixed=0)
    router, *_ = plan_cluster(base, size, "unix:///s", Path("keys"), num_cores=2)
    assert router.config.security.insecure is serves_everybody


@pytest.mark.parametrize("url", SAFE_REDIS)
def test_a_password_travels_encrypted_or_not_at_all(url: str) -> None:
    assert problems("serve", "--keys", "k", "--redis-url", url) == []


@pytest.mark.parametrize(
    "url", ["redis://10.0.0.1/0", "redis://redis:6379", "redis+sentinel://localhost,10.0.0.1/main"]
)
def test_a_password_in_clear_is_refused(url: str) -> None:
    (said,) = problems("serve", "--keys", "k", "--redis-url", url)
    assert said.startswith(f"redis_url is {url!r}: wanted rediss://")
    assert problems("serve", "--keys", "k", "--insecure", "--redis-url", url) == []
    # Without keys there is none to protect but the URL's own.
    assert problems("serve", "--redis-url", url) == []


def test_one_kv_key_is_enough() -> None:
    (said,) = problems("serve", "--keys", "k", "--kv-key", "f")
    assert said.startswith("kv_key is 'f': wanted none, because the keys folder has one")
