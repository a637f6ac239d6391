"""Requests of docs/api.md and README are sent as written, to a cluster of the tiny model.

Only the address and the name of the model are others.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.cluster import Cluster

ROOT = Path(__file__).resolve().parents[3]
ADDRESS, MODEL = "http://127.0.0.1:8000", "SmolLM2-135M-Instruct"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.M | re.S)


def sections() -> dict[str, dict[str, str]]:
    """Return the blocks of code of each request by their language; those of the client too."""
    page = (ROOT / "docs" / "api.md").read_text()
    copied = page.partition("## Requests to copy\n")[2].partition("\n## ")[0]
    client, *rest = copied.split("\n### ")
    found = {"": dict(BLOCK.findall(client))}
    for part in rest:
        found[part.partition("\n")[0]] = dict(BLOCK.findall(part))
    return found


SECTIONS = sections()


def message(answer: Any) -> Any:
    return answer["choices"][0]["message"]


def is_a_call(answer: Any) -> None:
    (call,) = message(answer)["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Berlin", "Paris", "Rome")


def is_a_rating(answer: Any) -> None:
    rating = json.loads(message(answer)["content"])
    assert set(rating) == {"genre", "stars"}
    assert rating["stars"] in range(1, 6)


def is_a_month(answer: Any) -> None:
    assert re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", message(answer)["content"])


def is_a_completion(answer: Any) -> None:
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] <= 8


def has_logprobs(answer: Any) -> None:
    entries = answer["choices"][0]["logprobs"]["content"]
    assert entries
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def is_a_stream(events: list[Any]) -> None:
    deltas = [event["choices"][0]["delta"] for event in events]
    assert len(deltas) > 1
    assert any(delta.get("content") for delta in deltas)


CHECKS: dict[str, Callable[[Any], None]] = {
    "A tool": is_a_call,
    "JSON of a schema": is_a_rating,
    "A regular expression": is_a_month,
    "A priority": is_a_completion,
    "Log probabilities": has_logprobs,
    "A stream": is_a_stream,
}


def for_cluster(code: str, cluster: Cluster) -> str:
    assert ADDRESS in code
    assert MODEL in code
    return code.replace(ADDRESS, cluster.url).replace(MODEL, "tiny")


def said_by_command(code: str, cluster: Cluster) -> str:
    """Run a shell's commands for this cluster, and return what they print."""
    done = subprocess.run(
        ["bash", "-euc", for_cluster(code, cluster)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def said_by_snippet(code: str, cluster: Cluster) -> str:
    """Run a snippet for this cluster as a program, and return what it prints.

    In this process, which then imports the client once for all of them.
    """
    printed = io.StringIO()
    program = compile(for_cluster(code, cluster), "snippet", "exec", dont_inherit=True)
    with contextlib.redirect_stdout(printed):
        exec(program, {"__name__": "__main__"})
    return printed.getvalue()


def test_every_request_is_checked() -> None:
    assert SECTIONS.keys() - {""} == CHECKS.keys()
    for name, blocks in SECTIONS.items():
        assert blocks.keys() == ({"sh", "python"} if name else {"python"}), name


@pytest.mark.parametrize("name", CHECKS)
def test_the_command(name: str, tiny_cluster: Cluster) -> None:
    printed = said_by_command(SECTIONS[name]["sh"], tiny_cluster)
    if name == "A stream":
        events = re.findall(r"^data: (\{.*)$", printed, re.M)
        assert printed.rstrip().endswith("data: [DONE]")
        CHECKS[name]([json.loads(event) for event in events])
    else:
        CHECKS[name](json.loads(printed))


@pytest.mark.parametrize("name", CHECKS)
def test_the_snippet(name: str, tiny_cluster: Cluster) -> None:
    code = SECTIONS[""]["python"] + SECTIONS[name]["python"]
    printed = said_by_snippet(code, tiny_cluster)
    if name == "A stream":
        CHECKS[name]([json.loads(line) for line in printed.splitlines()])
    else:
        CHECKS[name](json.loads(printed))


def test_the_snippet_and_the_command_of_the_first_page(tiny_cluster: Cluster) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    (snippet,) = [code for kind, code in blocks if kind == "python"]
    (command,) = [code for kind, code in blocks if kind == "sh" and "/v1/chat" in code]
    short = (snippet.replace("model=", "max_tokens=20, model="), '"stream": true, "max_tokens": 20')
    assert said_by_snippet(short[0], tiny_cluster).strip()
    printed = said_by_command(command.replace('"stream": true', short[1]), tiny_cluster)
    assert printed.rstrip().endswith("data: [DONE]")


def test_each_body_of_the_page_works_as_it_is_shown(tiny_cluster: Cluster) -> None:
    paths = httpx.get(f"{tiny_cluster.url}/openapi.json").json()["paths"]
    num_sent = 0
    for path, methods in paths.items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for name, example in content.get("application/json", {}).get("examples", {}).items():
            answer = httpx.post(f"{tiny_cluster.url}{path}", json=example["value"], timeout=60)
            assert answer.status_code == 200, (path, name, answer.text)
            num_sent += 1
    assert num_sent == 15
