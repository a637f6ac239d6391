"""What is checked and measured. Each phase returns what it found, or raises."""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import httpx

from pdserve.local_cluster.child_process import ending_with_parent
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.gpu.cluster.clusters import Clusters
from tests.gpu.cluster.shapes import Shape, make_folder, prompt_of
from tests.gpu.cluster.streams import Answer, Asked, ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.observing.samples import samples

_LEAST_SHOWN = 4
"""Tokens that every stream has shown on average when a node is killed."""
_NUM_FIRST_TOKENS = 5
_WARM_TOKENS = 16
_END_S = 30.0
"""A node whose card has failed has ended by then."""
_FRESH = 1 << 10
"""Salts from here on are of prompts that no node has seen."""


Said = tuple[tuple[int | None, float | None], ...]
"""An answer's tokens, each with its log probability where that was asked for."""


@dataclass(slots=True)
class Bits:
    """The same answers: `expected` are those of a mixed node that computes one at a time."""

    clusters: Clusters
    expected: list[Said]

    def alone(self) -> dict[str, Any]:
        """One at a time, the tokens of prefill and decode are those of one mixed node."""
        asked = compared(self.clusters.shape)
        self.expected = [_said(self._answers(self.clusters.mixed, [one]))[0] for one in asked]
        some = asked[: len(asked) // 2]  # the others are new to the nodes when they are loaded
        found = [_said(self._answers(self.clusters.apart, [one]))[0] for one in some]
        require_same(found, self.expected[: len(some)])
        assert len(set(self.expected)) == len(asked), "answers do not differ"
        placed = _placements(self.clusters.apart)
        assert any((one["prefill"] or "").startswith("prefill-1#") for one in placed), placed[:2]
        return {"answers": len(found), "tokens": sum(map(len, found))}

    def loaded(self) -> dict[str, Any]:
        """All at the same time, they are the same, on both."""
        self._require()
        asked = compared(self.clusters.shape)
        for cluster in self.clusters.both:
            require_same(_said(self._answers(cluster, asked)), self.expected)
            cluster.check_settled()
        return {"at a time": len(asked)}

    def killed(self) -> dict[str, Any]:
        """A decode node is killed in the middle of answers, and they are the same."""
        return self._interrupted(self.clusters.apart.processes["decode-1"].kill)

    def lost(self) -> dict[str, Any]:
        """A decode node's card fails in the middle of answers: it ends, and they are the same."""
        cluster = self.clusters.apart
        found = self._interrupted(lambda: cluster.fail_gpu("decode-2"), is_slow_after=True)
        code = cluster.processes["decode-2"].wait(_END_S)
        assert code, "the node ended as if nothing had happened"
        return found | {"exit code": code}

    def _interrupted(
        self, interrupt: Callable[[], None], *, is_slow_after: bool = False
    ) -> dict[str, Any]:
        """Interrupt a node in the middle of answers; they move, and are the same.

        Until then steps are slow, so that a client that is late does not miss the middle.
        """
        self._require()
        cluster = self.clusters.apart
        asked = compared(self.clusters.shape)
        before = {one["choice_id"] for one in _placements(cluster)}
        shown, interrupted_at = 0, 0
        slow = ExitStack()

        def count(num_events: int) -> None:
            nonlocal shown, interrupted_at
            shown += num_events
            if not interrupted_at and shown >= _LEAST_SHOWN * len(asked):
                interrupted_at = shown
                interrupt()
                if not is_slow_after:
                    slow.close()

        with slow:
            slow.enter_context(cluster.slow())
            found = _said(self._answers(cluster, asked, count))
        assert interrupted_at, "no node was interrupted"
        outcomes = [
            one["outcome"] for one in _placements(cluster) if one["choice_id"] not in before
        ]
        assert "retried" in outcomes, f"no answer was moved: {outcomes}"
        require_same(found, self.expected)
        return {"after tokens": interrupted_at, "moved": outcomes.count("retried")}

    def _require(self) -> None:
        assert self.expected, "there is nothing to compare with: phase alone has failed"

    def _answers(self, cluster: Cluster, asked: Sequence[Asked], count: Any = None) -> list[Answer]:
        return asyncio.run(ask_all(cluster.url, self.clusters.model, asked, count))


def compared(shape: Shape) -> list[Asked]:
    """The requests whose answers are compared: every second one is drawn, with its own seed.

    Two ways are drawn where logits are, two on the host. Every fourth one has log probabilities:
    they tell logits apart whose tokens are the same.
    """
    greedy, drawn = {"temperature": 0}, {"temperature": 0.8}
    filtered = drawn | {"top_k": 50, "top_p": 0.95}
    ways = (greedy | {"logprobs": 0}, filtered, greedy, drawn | {"presence_penalty": 0.1})
    return [
        Asked(
            prompt=prompt_of(shape, shape.bits_lengths[n % len(shape.bits_lengths)] + n, n),
            max_tokens=shape.compared_tokens,
            fields=ways[n % 4] | {"seed": n},
        )
        for n in range(shape.num_compared)
    ]


def first_tokens(clusters: Clusters) -> dict[str, Any]:
    """Times to the first token of prompts that come alone, and from it to the second, in ms.

    With prefill and decode apart also the time that decoding waited for KV, on average.
    """
    shape = clusters.shape
    found: dict[str, Any] = {}
    for cluster, name in zip(clusters.both, ("apart", "mixed"), strict=True):
        # A round before: the first steps of a size load kernels, and the first handoff a lane.
        for round_ in range(2):
            for length in shape.first_token_lengths:
                before, answers = _exposed(clusters), []
                for n in range(_NUM_FIRST_TOKENS):
                    salt = _FRESH + round_ * _NUM_FIRST_TOKENS + n
                    asked = _greedy(shape, length, salt, 4)
                    answers += asyncio.run(ask_all(cluster.url, clusters.model, [asked]))
                found[f"{name} {length}"] = _milliseconds([one.first_s for one in answers])
                seconds = [one.at_s[1] - one.at_s[0] for one in answers]
                found[f"{name} {length}, second token"] = _milliseconds(seconds)
                if cluster is clusters.apart:
                    waited_s, handoffs = (
                        now - then for now, then in zip(_exposed(clusters), before, strict=True)
                    )
                    first_s = statistics.median(one.first_s for one in answers)
                    mean_s = waited_s / max(handoffs, 1)
                    found[f"{name} {length}, exposed"] = {
                        "handoffs": int(handoffs), "mean": round(1000 * mean_s, 3),
                        "share of first token": round(mean_s / first_s, 4),
                    }  # fmt: skip
    return found


def _exposed(clusters: Clusters) -> tuple[float, float]:
    """Return the seconds for which decoding waited for KV, of all handoffs, and their number."""
    clusters.apart.check_settled()
    address = clusters.apart.record("prefill-1").metrics_address
    found = samples(httpx.get(f"http://{address}/metrics", timeout=5.0).text)
    name = "pdserve_kv_exposed_seconds"
    waited_s, handoffs = (
        sum(value for key, value in found.items() if key.startswith(f"{name}_{what}{{"))
        for what in ("sum", "count")
    )
    return waited_s, handoffs


def tokens(clusters: Clusters) -> dict[str, Any]:
    """Times between tokens while all streams decode, in milliseconds."""
    found: dict[str, Any] = {}
    shape = clusters.shape
    for cluster, name in zip(clusters.both, ("apart", "mixed"), strict=True):
        for count, streamed in shape.streamed_tokens.items():
            length = shape.context - streamed // 2
            # A short round first: a node may prepare a step of so many sequences at its first one.
            for round_, max_tokens in enumerate((_WARM_TOKENS, streamed)):
                salt = (2 + round_) * _FRESH + count * count
                asked = [_greedy(shape, length, salt + n, max_tokens) for n in range(count)]
                answers = asyncio.run(ask_all(cluster.url, clusters.model, asked))
            found[f"{name} {count}"] = steady(answers)
        cluster.check_settled()
    return found


def started(shape: Shape, folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    """`pdserve up`, twice: seconds from its start to its sample answer's first token."""
    model = make_folder(folder, shape)
    command = [sys.executable, "-m", "pdserve", "up", "--exit-after-sample"]
    command += [
        "--port",
        str(free_loopback_port()),
        "--model",
        str(model),
        "--load-format",
        "random",
        *shape.flags,
        *flags,
    ]
    times = []
    for _ in range(2):
        done = subprocess.run(ending_with_parent(command), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        times.append(float(re.findall(r"([0-9.]+) s after the start", done.stdout)[0]))
    return {"first token after, s": times}


def steady(answers: Sequence[Answer]) -> dict[str, Any]:
    """Gaps between tokens from the last stream's first token to the first stream's last one.

    Tokens that came in one piece count as one gap each: `mean` is time by tokens.
    """
    begins_s = max(answer.at_s[0] for answer in answers)
    ends_s = min(answer.at_s[-1] for answer in answers)
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in pairwise(answer.at_s)
        if earlier >= begins_s and later <= ends_s
    ]
    longest = max(b - a for answer in answers for a, b in pairwise(answer.at_s))
    if not gaps:
        return {"steady": 0, "longest": round(1000 * longest, 2)}
    return {
        **_milliseconds(gaps),
        "mean": round(1000 * statistics.fmean(gaps), 2),
        "p99": round(1000 * sorted(gaps)[int(0.99 * (len(gaps) - 1))], 2),
        "steady": len(gaps),
        "longest": round(1000 * longest, 2),
    }


def _greedy(shape: Shape, length: int, salt: int, max_tokens: int) -> Asked:
    prompt = prompt_of(shape, length, salt)
    return Asked(prompt=prompt, max_tokens=max_tokens, fields={"temperature": 0})


def _milliseconds(times_s: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(1000 * statistics.median(times_s), 2),
        "least": round(1000 * min(times_s), 2),
        "most": round(1000 * max(times_s), 2),
    }


def _said(answers: Sequence[Answer]) -> list[Said]:
    return [
        tuple(zip_longest(answer.tokens, answer.logprobs, fillvalue=None)) for answer in answers
    ]


def require_same(found: Sequence[Said], expected: Sequence[Said]) -> None:
    """Raise `AssertionError`, saying where they part, unless all answers are equal."""
    parted = {
        at: next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        for at, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        if ours != theirs
    }
    assert not parted, f"answers that part, and after how many tokens: {parted}"


def _placements(cluster: Cluster) -> list[dict[str, Any]]:
    reply = httpx.get(f"{cluster.url}/v1/cluster", timeout=5.0)
    placed: list[dict[str, Any]] = reply.json()["recent_placements"]
    return placed
