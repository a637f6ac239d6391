"""The command line as a user meets it: exit codes, help, and what is printed."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from common.version import VERSION
from pdserve.cli import main
from pdserve.configuration.config_sources import load_config
from pdserve.configuration.flags import COMMAND_GROUPS, EVERYDAY_KEYS, SET_BY_UP, build_parser
from pdserve.configuration.options import SECTIONS, all_options, options_of
from pdserve.configuration.other_words import COMMANDS, SETTINGS
from pdserve.configuration.shown_config import config_file_text
from tests.support.models.tiny_model import make_tiny_model


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [option.variable for option in all_options().values()]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def help_of(*arguments: str, capsys: pytest.CaptureFixture[str], part: str = "") -> str:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, f"--help={part}" if part else "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "check-config", "up"])
def test_help_names_every_setting_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys=capsys, part="all")
    words = text.replace(",", " ").split()
    own = SET_BY_UP if command == "up" else frozenset()
    for option in all_options().values():
        assert (option.flag in words) == (option.key not in own), option.flag
    assert "(1 to 4096; default: 32)" in " ".join(text.split())
    assert "--kv-cache-memory BYTES" in text
    assert "engine: budgets and memory of a node:" in text
    assert "examples:\n  pdserve " in text
    assert "[BYTES]" not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("columns", ["20", "60", "300"])
def test_help_fits_its_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for part in ("", "scheduling", "all"):
        text = help_of("serve", capsys=capsys, part=part)
        widths = [len(line) for line in text.splitlines()]
        assert max(widths) <= max(80, min(100, int(columns)))


@pytest.mark.parametrize("command", ["serve", "check-config", "up"])
def test_the_short_help_has_what_is_set_every_day_and_names_the_groups(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys=capsys)
    assert len(text.splitlines()) < 75
    own = SET_BY_UP if command == "up" else frozenset()
    for key in EVERYDAY_KEYS:
        assert (f" --{key.replace('_', '-')}" in text) == (key not in own), key
    for section in SECTIONS:
        assert f"  --help={section} " in text
        (group,) = [help_of(command, capsys=capsys, part=section)]
        flags = {o.flag for o in options_of(section) if o.key not in own}
        assert flags <= set(group.replace(",", " ").split())
        assert "--lease-s" not in group or section == "handoff"
    assert "pdserve up" in help_of(capsys=capsys, part="up")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["up", "--help=modle"], "--help=modle: wanted server, model, engine"),
        (["up", "--help=modle"], "all: did you mean model?"),
        (["--help=statsu"], "did you mean status?"),
        (["status", "--help=x"], "argument -h/--help: ignored explicit argument 'x'"),
        (["serv"], "pdserve: there is no command 'serv': wanted up, serve, status"),
        (["serv"], "; did you mean `pdserve serve`?"),
        (["run", "llama3"], "; `pdserve up --model MODEL` runs a cluster, and `pdserve chat`"),
        (["demo"], "; `pdserve up --model demo` runs a cluster"),
        (["./m.gguf"], "; `pdserve up --model ./m.gguf` runs a cluster"),
        (["up", "demo"], "argument 'demo': wanted flags only; a model is --model demo\n"),
        (
            ["serve", "Qwen/Qwen3-8B"],
            "--model Qwen/Qwen3-8B, and `pdserve up --model Qwen/Qwen3-8B`",
        ),
        (["up", "--tensor-parallel-size", "2"], "runs more nodes"),
        (["up", "--gpu-memory-utilization=0.9"], "it is --memory-fraction here"),
        (["serve", "-tp", "2"], "unknown flag -tp: a node computes on one device"),
        (["serve", "--max_num_seqs", "2"], "did you mean --max-num-seqs?"),
        (["status", "--port", "1"], "unexpected argument: --port: did you mean --url?"),
        (["drain", "n", "--wiat"], "unexpected argument: --wiat: did you mean --wait?"),
        (
            ["up", "--rope-scaling", "{}"],
            "unknown flag --rope-scaling: config.json of the model says",
        ),
        (["keys", "init", "d", "--dyas", "1"], "unexpected argument: --dyas"),
    ],
)
def test_other_words_get_a_hint(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert error in capsys.readouterr().err


def test_words_of_other_servers_are_known_in_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_CONTEXT_LENGTH", "1")
    path = tmp_path / "c.toml"
    path.write_text("[engine]\ngpu_memory_utilization = 0.9\n")
    assert main(["up", "--config", str(path), "--max-running-requests", "3"]) == 2
    said = capsys.readouterr().err
    assert "unknown variable PDSERVE_CONTEXT_LENGTH: it is PDSERVE_MAX_MODEL_LEN here" in said
    assert "'gpu_memory_utilization' in [engine]" in said
    assert "unknown flag --max-running-requests: it is --max-num-seqs here" in said
    assert f"of {path}: it is memory_fraction here" in said


def test_other_words_name_settings_that_there_are() -> None:
    for word, ours in SETTINGS.items():
        assert word.replace("-", "_") not in all_options(), word
        assert not ours.isidentifier() or ours in all_options(), ours
    for explained in (*SETTINGS.values(), *COMMANDS.values()):
        for flag in re.findall(r"--(?:no-)?([a-z-]+)", explained):
            assert flag.replace("-", "_") in {*all_options(), "prefill", "decode"}, flag
        for command in re.findall(r"`pdserve ([a-z]+)", explained):
            assert command in build_parser().commands(), command


def test_the_commands_are_listed_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys=capsys)
    grouped = [name for names in COMMAND_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(build_parser().commands())
    for title, names in COMMAND_GROUPS.items():
        lines = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines()
        shown = [re.match(r"  (\S+) +\S", line) for line in lines if not line.startswith("   ")]
        assert [one and one[1] for one in shown] == list(names)
    assert "--version" in text
    assert main([]) == 0
    assert capsys.readouterr().out == text
    assert help_of(capsys=capsys, part="all") == text


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pdserve {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["surf"], "pdserve: there is no command 'surf': wanted up, serve, "),
        (["--versoin"], "unexpected argument: --versoin: did you mean --version?"),
        (["keys", "ini"], "; did you mean `pdserve keys init`?"),
        (["api-keys", "ps"], "there is no command 'ps': wanted add, revoke, list\n"),
        (["keys", "init", "d", "--dyas", "1"], ": --dyas: did you mean --days?"),
        (["keys", "init", "d", "--days", "x"], "--days is 'x': wanted a whole number"),
        (["keys", "renew", "d", "nod"], "wanted router, node or redis: did you mean node?"),
        (["status", "--url"], "--url has no value"),
        (
            ["up", "--port", "0", "--log-folder", __file__],
            f"--log-folder {__file__} is a file: wanted a folder",
        ),
        (["keys", "init", __file__], f"{__file__} is no folder: wanted the name of a new one"),
        (["up", "--prefil", "2"], "unknown flag --prefil: did you mean --prefill?"),
        (["check-config", "--al"], "unknown flag --al: did you mean --all?"),
        (["serve", "--enable-prefix-caching=1"], "pdserve: argument --enable-prefix-caching"),
        (["serve", "--role", "mixed", "--model", "m", "--prot", "1"], "did you mean --port?"),
        (["serve"], "pdserve: 2 settings are wrong:\n  - role is missing"),
        (["up", "--prefill", "x"], "--prefill is 'x': wanted a number of nodes, 0 to 64"),
        (["up", "--decode"], "--decode has no value: wanted a number of nodes, 0 to 64"),
        (["up", "--mixed", "65"], "--mixed is '65': wanted a number of nodes, 0 to 64"),
        (["up", "--mixed", "00065"], "--mixed is '00065': wanted a number of nodes"),
        (["up", "--mixed", "9" * 5000], "--mixed is '99"),
        (["up", "--mixed", "-1"], "--mixed is '-1': wanted a number of nodes, 0 to 64"),
        (["up", "--decode", "0"], "wanted a prefill and a decode node, or a mixed node"),
        (["up", "--prefill", "x", "--port", "y"], "pdserve: 2 settings are wrong:\n  - --prefill"),
        (["up", "--prefix-host-memory", "9999TiB"], "wanted less than the memory of this machine"),
        (["up", "--kv-port", "1"], "kv_port cannot be set"),
        (["up", "--max-num-seqs", "64", "--speculative-method", "ngram"], "wanted at least 576"),
        (["up", "--chunk-granularity", "128"], "wanted at most block_size = 64"),
        (["status", "--port", "1"], "unexpected argument: --port"),
    ],
)
def test_wrong_settings_exit_with_2_and_start_nothing(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    assert captured.out == ""


def test_check_config_prints_a_file_that_gives_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_tiny_model(tmp_path / 'odd "na\\me'))
    arguments = ["--role", "mixed", "--model", model, "--kv-window", "3MiB"]
    secrets = ["--api-key", "hush", "--redis-url", "redis://:hush@h/1"]
    assert main(["check-config", *arguments, *secrets]) == 0
    printed = capsys.readouterr().out
    assert "hush" not in printed
    assert "# api_key is set, not shown" in printed
    assert 'redis_url = "redis://***@h/1"' in printed
    assert main(["check-config", *arguments]) == 0
    short = capsys.readouterr().out
    assert [line for line in short.splitlines() if line[:1] == "["] == ["[model]", "[handoff]"]
    assert re.search(r"^# [0-9]+ settings have their defaults: --all ", short, re.M)
    assert main(["check-config", "--all", *arguments]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\[scheduling\]\nreservation_policy = \"learned\" ", printed, re.M)
    assert re.search(r"^\[speculation\]\nspeculative_method = \"none\" ", printed, re.M)
    for line in printed.splitlines():
        assert not line or line.startswith("[") or "  # default" in line or "  # flag --" in line
    path = tmp_path / "again.toml"
    wanted = load_config({"role": "mixed", "model": model, "kv_window": "3MiB"}, [], {})
    for text in (short, printed):
        path.write_text(text)
        assert load_config({"config": str(path)}, [], {}).config == wanted.config


def test_a_childs_file_reads_back_exactly(tmp_path: Path) -> None:
    flags = {"role": "decode", "model": "é/☃/𝄞 \"'", "api_key": "hush", "lease_s": "1.25"}
    config = load_config(flags, [], {}).config
    path = tmp_path / "child.toml"
    path.write_text(config_file_text(config), encoding="utf-8")
    assert tomllib.loads(path.read_text(encoding="utf-8"))["api"]["api_key"] == "hush"
    assert load_config({"config": str(path)}, [], {}).config == config


def test_status_without_a_router_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1: nothing listens there" in capsys.readouterr().err
    assert main(["status", "--url", "ftp://localhost"]) == 1
    assert "the URL is 'ftp://localhost': wanted http://host:port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["role", "n", "nosuch"], "ROLE is 'nosuch': wanted prefill, decode or mixed"),
        (["role", "n", "mixd"], "did you mean mixed?"),
        (["role", "n", "router"], "ROLE is 'router': wanted prefill, decode or mixed"),
        (["role", "", "mixed"], "NODE_ID is empty"),
        (["drain", " "], "NODE_ID is empty"),
        (["chat"], "the input is empty: wanted a message"),
    ],
)
def test_what_no_router_would_take_is_told_without_one(
    arguments: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main([*arguments, "--url", "http://127.0.0.1:1"]) == 2
    assert error in capsys.readouterr().err


def test_a_name_of_no_host_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert main(["role", "decode-1", "mixed", "--url", "http://nowhere"]) == 1
    said = "http://nowhere: no host has this name: wanted http://host:port"
    assert said in capsys.readouterr().err


def test_https_of_a_router_without_tls_is_a_clear_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        router = threading.Thread(target=refuse)
        router.start()
        assert main(["status", "--url", f"https://127.0.0.1:{server.getsockname()[1]}"]) == 1
        router.join()
    said = capsys.readouterr().err
    assert "TLS fails (WRONG_VERSION_NUMBER): wanted a certificate" in said


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pdserve.cli import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"paddle", "numba", "numpy", "grpc", "fastapi", "redis", "tokenizers"}
    assert "pdserve" in loaded
