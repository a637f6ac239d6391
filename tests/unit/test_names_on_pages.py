"""What the documents name is there: flags, variables, metrics, endpoints, commands, extras.

Where a page gives the default of a setting, it is the one of the code.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from pdserve.configuration.config_sources import OTHER_VARIABLES
from pdserve.configuration.options import all_options
from router.http.routes import Access
from tests.support.http.http_edge import declared_routes, make_edge
from tests.unit.tree import ROOT, all_files, python_files
from tools.generate_metrics_table import described_metrics

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Flags of other programs (pytest, docker, pip, configure, kubectl, Redis), and one that a benchmark
# makes of a table.
OTHER_FLAGS = {
    *("--lf", "--scale", "--cpus", "--extra-index-url", "--enable-optimizations", "--from-file"),
    *("--selector", "--previous", "--weights", "--protected-mode"),
}
# An example of a name, and a setting of nginx.
OTHER_WORDS = {"num_x", "proxy_buffering"}
OF_PROJECT = {".py", ".toml", ".yaml", ".js", ".proto", ".conf", ".cfg", ".json", ".tpl", ".acl"}
OF_KUBERNETES = {"PDSERVE_ROUTER_SERVICE_HOST"}
# `drain_timeout_s` (default 30 s), `skip_ahead_window` (4), | `--target-ttft-s` | 2 s |
DEFAULT = re.compile(
    r"`(?:--)?([a-z][a-z_-]+)`(?: bytes)? (?:\((?:default )?|\| )"
    r"(\d+(?:\.\d+)?)( s| MiB|)(?=[),]| \|)"
)
UNITS = {"": 1, " s": 1, " MiB": 1 << 20}
ACCESS = {
    Access.ANYBODY: "none",
    Access.PAGE: "none",
    Access.KEY: "any",
    Access.LIMITED: "any, within its limits",
    Access.METRICS: "any, or the metrics token",
    Access.ADMIN: "an administrator's",
}


@cache
def flags_in_sources() -> frozenset[str]:
    """The flags that commands, benchmarks, tests and tools declare."""
    sources = (path.read_text(encoding="utf-8") for path in python_files())
    return frozenset(flag for text in sources for flag in re.findall(r'"(--[a-z][\w-]*)"', text))


def flags_of_settings() -> set[str]:
    return {option.flag for option in all_options().values()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_on_a_page_exists(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8")))
    assert named - flags_of_settings() - flags_in_sources() - OTHER_FLAGS == set()


def test_defaults_on_pages_are_those_of_the_code() -> None:
    options = {option.key: option.default for option in all_options().values()}
    found = []
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        for name, number, unit in DEFAULT.findall(text):
            key = name.replace("-", "_")
            if key in options:
                found.append((page.name, key, float(number) * UNITS[unit]))
    assert len(found) > 12
    assert [one for one in found if one[2] != options[one[1]]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_on_a_page_exists(page: Path) -> None:
    named = set(re.findall(r"\bPDSERVE_[A-Z_]+\b(?!…)", page.read_text(encoding="utf-8")))
    known = {option.variable for option in all_options().values()}
    assert named - known - {*OTHER_VARIABLES, *OF_KUBERNETES} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_on_a_page_exists(page: Path) -> None:
    named = re.findall(
        r"`[^`]*?\b(pdserve_[a-z_]+[a-z])\b(?!…|\.proto)", page.read_text(encoding="utf-8")
    )
    assert {re.sub("_(sum|count|bucket)$", "", name) for name in named} - metric_names() == set()


def metric_names() -> set[str]:
    return {metric.name for table in described_metrics().values() for metric in table}


@cache
def words_of_the_project() -> frozenset[str]:
    """The words of all sources and settings of the project, its metrics, and names of files."""
    here = Path(__file__)
    files = [path for path in all_files() if path.suffix in OF_PROJECT and path != here]
    words = {path.stem for path in files}
    for path in files:
        words.update(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    return frozenset(words | metric_names())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_in_the_code_on_a_page_exists(page: Path) -> None:
    """What a page writes as code with an underscore: functions, fields, settings, error codes."""
    code = "\n".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
    named = set(re.findall(r"(?<![\w…-])_?[a-z]\w*_\w*[a-z0-9](?![\w…-])", code))
    assert named - words_of_the_project() - OTHER_WORDS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_target_that_is_run_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = re.findall(r"python3? -m ((?:bench|tests|tools|router|grammars)[\w.]*)", text)
    files = [ROOT / name.replace(".", "/") for name in modules]
    assert [one for one in files if not one.with_suffix(".py").exists() and not one.is_dir()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"(?:^[ $]*|`)make ([a-z-]+)(?=[` ]*(?:$|`|#| ARGS| MODEL))", text, re.MULTILINE)
    )
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_extra_on_a_page_exists(page: Path) -> None:
    groups = re.findall(r"(?:\.|pdserve)\[([a-z,-]+)\]", page.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for group in groups for extra in group.split(",")}
    assert named - set(project["optional-dependencies"]) == set()


def endpoints() -> dict[str, str]:
    """The key that each endpoint of a router needs, by what the pages call it."""
    found = {}
    for route, access in declared_routes(make_edge()):
        (method,) = route.methods or set()
        path = re.sub(r"\{(\w+)(?::path)?\}", lambda match: match[1].upper(), route.path)
        found[f"{method} {path}"] = ACCESS[access]
    return found


def test_the_first_page_has_every_endpoint() -> None:
    table = (ROOT / "README.md").read_text().partition("\n## The API\n")[2].partition("\n- ")[0]
    beside = {"GET /docs/NAME", "GET /v1/models/NAME"}
    assert named_endpoints(table) == endpoints().keys() - beside


def test_the_api_page_says_which_key_each_endpoint_needs() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    table = text.partition("\n## Endpoints\n")[2].partition("| key |")[2].partition("\n\n")[0]
    keys: dict[str, str] = {}
    for names, key in re.findall(r"^\| (`.+?) \|.*\| ([^|]+) \|$", table, re.MULTILINE):
        keys |= dict.fromkeys(named_endpoints(names), key)
    assert keys == endpoints()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_endpoint_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.-])(/(?:v1|tokenize|detokenize)(?:/[a-z_]+)*)\b", text)
    of_other_servers = {"/v1/embeddings"}
    paths = {name.partition(" ")[2] for name in endpoints()} | of_other_servers
    assert {one for one in named if one not in paths and one != "/v1"} == set()


def named_endpoints(text: str) -> set[str]:
    return set(re.findall(r"`((?:GET|POST) /[\w/.]*)`", text))
