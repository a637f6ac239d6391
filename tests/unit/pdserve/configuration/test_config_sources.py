"""Flags, variables and the file: who wins, and what is said about every kind of mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.nodes import Role
from pdserve.configuration.config_sources import (
    SERVE,
    Command,
    LoadedConfig,
    SettingsError,
    is_injected,
    load_config,
)
from pdserve.configuration.flags import SET_BY_UP, UP_DEFAULTS, build_parser
from pdserve.configuration.options import all_options

UP = Command(name="pdserve up", defaults=UP_DEFAULTS, own_keys=SET_BY_UP)
ENOUGH = ("--role", "decode", "--model", "m")

TIME = "a number of seconds, or a time such as 90s, 5m or 1h"


def load(
    *arguments: str, environ: Mapping[str, str] | None = None, command: Command = SERVE
) -> LoadedConfig:
    name = command.name.removeprefix("pdserve ")
    parsed, unknown = build_parser().parse_known_args([name, *arguments])
    role = Role.ROUTER if command is UP else None
    return load_config(vars(parsed), unknown, environ or {}, command=command, role=role)


def problems(
    *arguments: str, environ: Mapping[str, str] | None = None, command: Command = SERVE
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(*arguments, environ=environ, command=command)
    return list(caught.value.problems)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pdserve.toml"


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(file: Path) -> None:
    file.write_text("[engine]\nmax_num_seqs = 1\nblock_size = 1\nnum_threads = 1\n")
    loaded = load(
        *ENOUGH,
        *("--config", str(file), "--max-num-seqs", "3"),
        environ={"PDSERVE_MAX_NUM_SEQS": "2", "PDSERVE_BLOCK_SIZE": "2"},
    )
    engine = loaded.config.engine
    assert (engine.max_num_seqs, engine.block_size, engine.num_threads) == (3, 2, 1)
    assert engine.max_num_batched_tokens == 8192
    assert loaded.origins["max_num_seqs"] == "flag --max-num-seqs"
    assert loaded.origins["block_size"] == "variable PDSERVE_BLOCK_SIZE"
    assert loaded.origins["num_threads"] == f"file {file} [engine] num_threads"
    assert loaded.origins["max_num_batched_tokens"] == "default"


def test_the_file_is_named_by_a_variable_or_a_flag_and_the_flag_wins(file: Path) -> None:
    file.write_text('role = "mixed"\n[model]\nmodel = "from-the-file"\n')
    for arguments, environ in (
        (("--config", str(file)), {}),
        ((), {"PDSERVE_CONFIG": str(file)}),
        (("--config", str(file)), {"PDSERVE_CONFIG": "/nowhere"}),
    ):
        config = load(*arguments, environ=environ).config
        assert (config.role, config.model.model) == (Role.MIXED, "from-the-file")


LEGAL_VALUES = {
    "cors_origins": "https://chat.example.org",
    "prefix_sharing": "none",
    "tool_format": "hermes",
    "reasoning_format": "think",
    "model": "m",
    "dtype": "auto",
    "log_level": "info",
    "host": "127.0.0.2",
    "kv_host": "127.0.0.2",
    "log_format": "json",
    "otel_endpoint": "http://collector:4317",
    "attention_backend": "numba",
    "gpus": "0,1",
    "kv_cache_dtype": "int8",
    "activation_dtype": "int8",
    "load_format": "random",
    "quantization": "q4_0",
    "redis_url": "unix:///s",
    "placement_policy": "round_robin",
    "reservation_policy": "global_ratio",
    "preemption_policy": "shortest_output",
    "async_scheduling": "on",
    "preemption_mode": "swap",
    "requeue": "tail",
    "speculative_method": "ngram",
    "kv_transport": "zmq",
    "kv_lanes": "4",
    "kv_verify": "commit",
}


REQUIRED_WITH = {
    "tls_cert": ("--tls-key", "k"),
    "tls_key": ("--tls-cert", "c"),
    "prefix_disk": ("--prefix-disk-size", "1GiB", "--prefix-host-memory", "1GiB"),
    "prefix_disk_size": ("--prefix-disk", "/x", "--prefix-host-memory", "1GiB"),
}


def test_every_setting_can_come_from_each_source(file: Path) -> None:
    for option in all_options().values():
        if option.key == "role":
            continue
        by_kind = {"int": "64", "float": "0.5", "bool": "false", "bytes": "64MiB", "seconds": "5"}
        value = LEGAL_VALUES.get(option.key) or by_kind.get(option.kind, "x")
        quoted = f'"{value}"' if option.kind in ("str", "bytes") else value
        file.write_text(f"[{option.section}]\n{option.key} = {quoted}\n")
        flag = [f"--no-{option.key.replace('_', '-')}"] if option.kind == "bool" else []
        base = ["--role", "decode"] if option.key == "model" else [*ENOUGH]
        base += ["--speculative-method", "mtp"] if option.key == "speculative_model" else []
        base += REQUIRED_WITH.get(option.key, ())
        by_flag = load(*base, *(flag or [option.flag, value]))
        by_variable = load(*base, environ={option.variable: value})
        by_file = load(*base, "--config", str(file))
        assert by_flag.config == by_variable.config == by_file.config, option.key
        assert by_flag.origins[option.key] == f"flag {option.flag}"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("10m", 10 << 20),
        ("1.5Gi", 3 << 29),
        ("65536k", 64 << 20),
        ("1T", 1 << 40),
        ("1.5gib", 3 << 29),
        ("2 GB", 2 * 10**9),
        ("1e9", 10**9),
        ("2097152B", 2 << 20),
    ],
)
def test_sizes(text: str, size_bytes: int, file: Path) -> None:
    assert load(*ENOUGH, "--kv-cache-memory", text).config.engine.kv_cache_memory == size_bytes
    file.write_text(f'[engine]\nkv_cache_memory = "{text}"\n')
    assert load(*ENOUGH, "--config", str(file)).config.engine.kv_cache_memory == size_bytes


@pytest.mark.parametrize(("text", "size_bytes"), [("1e9", 10**9), ("67108864", 64 << 20)])
def test_sizes_as_toml_numbers(text: str, size_bytes: int, file: Path) -> None:
    file.write_text(f"[engine]\nkv_cache_memory = {text}\n")
    assert load(*ENOUGH, "--config", str(file)).config.engine.kv_cache_memory == size_bytes


@pytest.mark.parametrize("text", ["true", "YES", "on", "1"])
def test_truths(text: str) -> None:
    environ = {"PDSERVE_ENABLE_PREFIX_CACHING": text}
    assert load(*ENOUGH, environ=environ).config.engine.enable_prefix_caching is True


BAD_FLAGS = [
    (("--port", "x"), "port is 'x': wanted a whole number (from flag --port)"),
    (("--port", "1.0"), "port is '1.0': wanted a whole number (from flag --port)"),
    (("--port", ""), "port is empty: wanted a whole number (from flag --port)"),
    (("--port",), "port has no value: wanted a whole number (from flag --port)"),
    (("--port", "-1"), "port is -1: wanted 0 to 65535 (from flag --port)"),
    (("--port", "65536"), "port is 65536: wanted 0 to 65535 (from flag --port)"),
    (
        ("--max-model-len", "9" * 20),
        f"max_model_len is '{'9' * 20}': wanted at most {2**63 - 1} (from flag --max-model-len)",
    ),
    (("--lease-s", "soon"), f"lease_s is 'soon': wanted {TIME} (from flag --lease-s)"),
    (("--lease-s", "nan"), f"lease_s is 'nan': wanted {TIME} (from flag --lease-s)"),
    (
        ("--lease-s", "0"),
        "lease_s is 0.0: wanted 0.1 to 3600 seconds (from flag --lease-s)",
    ),
    (
        ("--kv-window", "2Gx"),
        "kv_window is '2Gx': wanted a number of bytes, such as 512MiB, 2G or 1e9"
        " (from flag --kv-window)",
    ),
    (
        ("--kv-window", "1e99"),
        f"kv_window is '1e99': wanted at most {2**63 - 1} (from flag --kv-window)",
    ),
    (
        ("--kv-window", "1.0001KiB"),
        "kv_window is '1.0001KiB': wanted a whole number of bytes (from flag --kv-window)",
    ),
    (
        ("--node-id", "a\nb"),
        "node_id is 'a\\nb': wanted UTF-8 text without control characters (from flag --node-id)",
    ),
    (
        ("--node-id", "\udcff"),
        "node_id is '\\udcff': wanted UTF-8 text without control characters (from flag --node-id)",
    ),
    *(
        (
            ("--redis-url", url),
            f"redis_url is {repr(url) if url else 'empty'}: wanted redis://host:port/db, "
            "rediss://…, redis+sentinel://host,host/service, redis+cluster://host,host or "
            "unix://… (from flag --redis-url)",
        )
        for url in ("", "h:6379", "memory://", "redis://h:port", "redis://h:99999", "rediss://h:0")
    ),
    (("--max-num-seq", "3"), "unknown flag --max-num-seq: did you mean --max-num-seqs?"),
    (("--quantum",), "unknown flag --quantum"),
    (("--nonsense",), "unknown flag --nonsense"),
    (
        ("stray",),
        "unexpected argument 'stray': wanted flags only, and commas between several values of one",
    ),
    (("--config",), "--config has no value: wanted the path of a TOML file"),
    (
        ("--max-num-batched-tokens", "8"),
        "max_num_batched_tokens is 8: wanted at least 32 for max_num_seqs = 32 sequences of 1 "
        "token (speculative_method = none), or max_num_seqs at most 8 (max_num_batched_tokens "
        "from flag --max-num-batched-tokens, max_num_seqs from default, speculative_method from "
        "default)",
    ),
]


@pytest.mark.parametrize(("arguments", "problem"), BAD_FLAGS)
def test_a_bad_flag(arguments: tuple[str, ...], problem: str) -> None:
    assert problems(*ENOUGH, *arguments) == [problem]


BAD_KEYS = [
    ("[engine]\nmax_num_seq = 1", "'max_num_seq' in [engine]", ": did you mean max_num_seqs?"),
    ("[engine]\nmax-num-seqs = 1", "'max-num-seqs' in [engine]", ": did you mean max_num_seqs?"),
    ("[engine]\nport = 1", "'port' in [engine]", ": port belongs in [server]"),
    ("port = 1", "'port' at the top", ": port belongs in [server]"),
    ("[server]\nrole = 'mixed'", "'role' in [server]", ": role belongs at the top"),
    ("[server]\nzzz = 'mixed'", "'zzz' in [server]", ""),
]


@pytest.mark.parametrize(("text", "key", "hint"), BAD_KEYS)
def test_an_unknown_key_in_the_file(file: Path, text: str, key: str, hint: str) -> None:
    file.write_text(text)
    assert problems(*ENOUGH, "--config", str(file)) == [f"unknown key {key} of {file}{hint}"]


def test_an_unknown_section_in_the_file(file: Path) -> None:
    file.write_text("engine = 1\n[serve]\nport = 1")
    assert problems(*ENOUGH, "--config", str(file)) == [
        f"'engine' in {file} is a value: wanted a section [engine]",
        f"unknown section [serve] in {file}: did you mean server?",
    ]


SIZE = "a number of bytes, such as 512MiB, 2G or 1e9"
BAD_VALUES = [
    ("scheduling", "init_new_token_ratio", "'half'", "is 'half'", "a number"),
    ("scheduling", "init_new_token_ratio", "nan", "is nan", "a number"),
    ("scheduling", "clip_max_new_tokens", "1.5", "is 1.5", "a whole number"),
    ("scheduling", "swap_space", "true", "is True", SIZE),
    ("speculation", "num_speculative_tokens", "'4'", "is '4'", "a whole number"),
    ("engine", "max_num_seqs", "'8'", "is '8'", "a whole number"),
    ("engine", "max_num_seqs", "true", "is True", "a whole number"),
    ("engine", "max_num_seqs", "8.0", "is 8.0", "a whole number"),
    ("engine", "max_num_seqs", "{}", "is {}", "a whole number"),
    ("engine", "enable_prefix_caching", "1", "is 1", "true or false"),
    ("model", "served_model_name", "1", "is 1", "text"),
    ("handoff", "lease_s", "inf", "is inf", TIME),
    ("handoff", "lease_s", "true", "is True", TIME),
    ("engine", "kv_cache_memory", "1.5", "is 1.5", SIZE),
    ("engine", "kv_cache_memory", "1979-05-27", "is datetime.date(1979, 5, 27)", SIZE),
]


@pytest.mark.parametrize(("section", "key", "raw", "shown", "wanted"), BAD_VALUES)
def test_a_value_of_a_wrong_type_in_the_file(
    file: Path, section: str, key: str, raw: str, shown: str, wanted: str
) -> None:
    file.write_text(f"[{section}]\n{key} = {raw}")
    assert problems(*ENOUGH, "--config", str(file)) == [
        f"{key} {shown}: wanted {wanted} (from file {file} [{section}] {key})"
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[engine", "is not TOML: "),
        (b"\xff", "is not UTF-8 text"),
        (b"#" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
        (b"a = " + b"[" * 10_000, "is nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_the_only_problem(
    file: Path, content: bytes, reason: str
) -> None:
    file.write_bytes(content)
    (problem,) = problems("--config", str(file))
    assert problem.startswith(f"the configuration file {file} {reason}")


@pytest.mark.covers("M12")
@pytest.mark.parametrize(
    "variable", ["PDSERVE_API_KEY", "PDSERVE_REDIS_URL", "PDSERVE_SERVED_MODEL_NAME"]
)
def test_a_secret_with_the_end_of_a_line_is_told_at_the_start(variable: str) -> None:
    """As `echo key | base64` makes it for Kubernetes: no client could send such a key."""
    router = ("--role", "router", "--model", "m")
    (problem,) = problems(*router, environ={variable: "secret\n"})
    assert problem.endswith(
        f"wanted UTF-8 text without control characters (from variable {variable})"
    )


@pytest.mark.covers("M11")
def test_a_byte_order_mark_and_lines_of_windows_are_read(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf[model]\r\nmodel = 'there'\r\n")
    assert load("--config", str(file), "--role", "router").config.model.model == "there"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert problems("--config", str(missing)) == [
        f"cannot read the configuration file {missing}: No such file or directory"
    ]
    assert problems("--config", str(tmp_path)) == [
        f"cannot read the configuration file {tmp_path}: Is a directory"
    ]


def test_variables() -> None:
    environ = {
        "PDSERVE_PROT": "1",
        "PDSERVE_FOO": "1",
        "PDSERVE_PORT": "many",
        "PDSERVE_CACHE": "/anywhere",
        "PATH": "/bin",
    }
    assert problems(*ENOUGH, environ=environ) == [
        "unknown variable PDSERVE_FOO",
        "port is 'many': wanted a whole number (from variable PDSERVE_PORT)",
        "unknown variable PDSERVE_PROT: did you mean PDSERVE_PORT?",
    ]


SERVICES = {
    # A Service `pdserve-router` with a named port, and one named `pdserve` whose port is 8000.
    "PDSERVE_ROUTER_SERVICE_HOST": "10.96.0.7",
    "PDSERVE_ROUTER_SERVICE_PORT": "8000",
    "PDSERVE_ROUTER_SERVICE_PORT_HTTP": "8000",
    "PDSERVE_ROUTER_PORT": "tcp://10.96.0.7:8000",
    "PDSERVE_ROUTER_PORT_8000_TCP": "tcp://10.96.0.7:8000",
    "PDSERVE_ROUTER_PORT_8000_TCP_PROTO": "tcp",
    "PDSERVE_ROUTER_PORT_8000_TCP_PORT": "8000",
    "PDSERVE_ROUTER_PORT_8000_TCP_ADDR": "fd00::7",
    "PDSERVE_SERVICE_HOST": "10.96.0.8",
    "PDSERVE_SERVICE_PORT": "8000",
    "PDSERVE_PORT": "tcp://10.96.0.8:8000",
    "PDSERVE_PORT_80_TCP": "tcp://10.96.0.8:80",
    "PDSERVE_PORT_80_TCP_ADDR": "10.96.0.8",
    "PDSERVE_KV_PORT": "udp://[fd00::8]:9001",
}


def test_the_variables_of_kubernetes_services_are_no_settings() -> None:
    loaded = load(*ENOUGH, environ=SERVICES)
    assert (loaded.config.server.port, loaded.config.server.kv_port) == (0, 0)
    assert set(loaded.origins.values()) == {"default", "flag --role", "flag --model"}


def test_no_setting_has_a_name_that_kubernetes_uses() -> None:
    names = [option.variable for option in all_options().values()]
    assert [name for name in names if is_injected(name, "8000")] == []


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PDSERVE_PORT", "8000x", "port is '8000x': wanted a whole number"),
        ("PDSERVE_HTTP_PORT", "8000", "unknown variable PDSERVE_HTTP_PORT"),
        ("PDSERVE_SERVICE", "tcp://10.0.0.1:1", "unknown variable PDSERVE_SERVICE"),
        ("PDSERVE_HOST_PORT_TCP", "1", "unknown variable PDSERVE_HOST_PORT_TCP"),
    ],
)
def test_a_variable_that_only_looks_like_one_is_a_problem(
    name: str, value: str, problem: str
) -> None:
    (told,) = problems(*ENOUGH, environ={name: value})
    assert told.startswith(problem)


@pytest.mark.parametrize(
    "host", ["pod-7.pods.svc", "10.1.2.3", "fd00::7", "127.0.0.1", "a", "node_1", "x" * 253]
)
def test_a_host_to_advertise(host: str) -> None:
    config = load(*ENOUGH, "--advertise-host", host).config
    assert config.server.advertise_host == host


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.1.2.3:9000", "[fd00::7]", "a b", ".a", "a/b", "x" * 254]
)
def test_what_others_cannot_reach_is_not_advertised(host: str) -> None:
    (told,) = problems(*ENOUGH, "--advertise-host", host)
    assert "wanted a host name or an IP address, without port and brackets" in told


def test_all_problems_of_all_sources_are_told_at_once(file: Path) -> None:
    file.write_text("[api]\nmax_body = 1\nmax_boddy = 1\n")
    assert problems(
        *("--role", "decoder", "--config", str(file), "--dtype", "int3", "--lease", "3"),
        environ={"PDSERVE_BLOCK_SIZE": "48"},
    ) == [
        f"unknown key 'max_boddy' in [api] of {file}: did you mean max_body?",
        "unknown flag --lease: did you mean --lease-s?",
        "role is 'decoder': wanted router, prefill, decode or mixed: did you mean decode?"
        " (from flag --role)",
        "model is empty: wanted a Hugging Face folder or a .gguf file (set it with --model, "
        "PDSERVE_MODEL, or model under [model] in the file)",
        "dtype is 'int3': wanted auto, float32, float16 or bfloat16 (from flag --dtype)",
        "block_size is 48: wanted a power of two, at most 1024 (from variable PDSERVE_BLOCK_SIZE)",
        f"max_body is 1 bytes: wanted 1KiB or more (from file {file} [api] max_body)",
    ]


def test_a_missing_role_is_a_problem() -> None:
    assert problems("--model", "m") == [
        "role is missing: wanted router, prefill, decode or mixed "
        "(set it with --role, PDSERVE_ROLE, or role in the file)"
    ]


def test_a_value_already_reported_breaks_no_second_rule() -> None:
    (problem,) = problems(*ENOUGH, "--max-num-seqs", "x", "--max-num-batched-tokens", "8")
    assert problem.startswith("max_num_seqs is 'x'")


def test_secrets_are_not_repeated(file: Path) -> None:
    file.write_text("[api]\napi_key = 42\n")
    told = problems(
        *(*ENOUGH, "--config", str(file), "--api-kye", "hush", "--api-kay=hush"),
        *("--redis-url", "http://me:hush@host"),
        environ={"PDSERVE_APIKEY": "hush"},
    )
    assert told == [
        f"api_key has a wrong value (not shown): wanted text (from file {file} [api] api_key)",
        "unknown variable PDSERVE_APIKEY: did you mean PDSERVE_API_KEY?",
        "unknown flag --api-kye: did you mean --api-key?",
        "unknown flag --api-kay: did you mean --api-key?",
        "redis_url is 'http://***@host': wanted redis://host:port/db, rediss://…, "
        "redis+sentinel://host,host/service, redis+cluster://host,host or unix://… "
        "(from flag --redis-url)",
    ]


def test_a_long_url_is_cut_without_showing_its_password() -> None:
    (told,) = problems(*ENOUGH, "--redis-url", f"http://me:{'hush' * 30}@host")
    assert "hush" not in told
    assert "http://***@host" in told


def test_a_switch_needs_no_value() -> None:
    assert load(*ENOUGH).config.scheduling.enable_priority_scheduling is False
    loaded = load(*ENOUGH, "--enable-priority-scheduling")
    assert loaded.config.scheduling.enable_priority_scheduling is True


def test_the_rules_between_sections_say_where_each_value_is_from(file: Path) -> None:
    file.write_text("[engine]\nmax_num_batched_tokens = 2048\n")
    told = problems(
        *(*ENOUGH, "--config", str(file), "--max-num-seqs", "512", "--speculative-method", "mtp"),
        environ={"PDSERVE_NUM_SPECULATIVE_TOKENS": "4"},
    )
    assert told == [
        "max_num_batched_tokens is 2048: wanted at least 2560 for max_num_seqs = 512 sequences of "
        "5 tokens (1 and num_speculative_tokens = 4 of speculative_method = mtp), or max_num_seqs "
        f"at most 409 (max_num_batched_tokens from file {file} [engine] max_num_batched_tokens, "
        "max_num_seqs from flag --max-num-seqs, num_speculative_tokens from variable "
        "PDSERVE_NUM_SPECULATIVE_TOKENS, speculative_method from flag --speculative-method)"
    ]


def test_a_local_cluster_has_its_own_defaults_and_settings() -> None:
    loaded = load(command=UP)
    assert loaded.config.model.model == "demo"
    assert loaded.config.server.port == 8000
    assert loaded.config.engine.max_num_batched_tokens == 512
    assert loaded.config.engine.memory_fraction == 0.0
    assert loaded.config.engine.kv_cache_memory == 0
    assert loaded.origins["model"] == "default of `pdserve up`"
    assert load("--kv-cache-memory", "1GiB", command=UP).config.engine.kv_cache_memory == 1 << 30
    assert problems(
        *("--redis-url", "redis://h"), environ={"PDSERVE_ROLE": "decode"}, command=UP
    ) == [
        "role cannot be set: `pdserve up` chooses it (from variable PDSERVE_ROLE)",
        "redis_url cannot be set: `pdserve up` chooses it (from flag --redis-url)",
    ]


@pytest.mark.parametrize(
    ("flags", "wanted_s"),
    [
        ((), 600.0),
        (("--request-timeout-s", "45"), 45.0),
        (("--request-timeout-s", "86400"), 3600.0),
        (("--request-timeout-s", "45", "--drain-timeout-s", "0"), 0.0),
    ],
)
def test_a_router_waits_as_long_for_its_requests_as_they_may_take(
    flags: tuple[str, ...], wanted_s: float
) -> None:
    assert (
        load("--role", "router", "--model", "m", *flags).config.server.drain_timeout_s == wanted_s
    )
    node = load(*ENOUGH, "--request-timeout-s", "45").config.server
    assert node.drain_timeout_s == 30.0, "it hands its requests over"
    assert load(command=UP).config.server.drain_timeout_s == 30.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300.0), ("90s", 90.0), ("1.5 h", 5400.0), ("500ms", 0.5), ("2min", 120.0), ("7", 7.0)],
)
def test_times_as_people_write_them(tmp_path: Path, text: str, seconds: float) -> None:
    assert load(*ENOUGH, f"--request-timeout-s={text}").config.api.request_timeout_s == seconds
    path = tmp_path / "times.toml"
    path.write_text(f'[api]\nrequest_timeout_s = "{text}"\n')
    assert load(*ENOUGH, "--config", str(path)).config.api.request_timeout_s == seconds


@pytest.mark.parametrize("text", ["5 minutes ago", "m", "-5m", "5y", "1e3m", "infm"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(TIME)):
        load(*ENOUGH, f"--request-timeout-s={text}")
