"""`lm-eval`: a task of log-likelihoods and one of generation, on a cluster of the demo model."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "lm_eval_tasks"
SERVER, MODEL_FOLDER = f"http://127.0.0.1:{sys.argv[1]}", sys.argv[2]

caches = tempfile.TemporaryDirectory(prefix="pdserve-lm-eval-caches-")
os.environ |= {"HF_HOME": caches.name, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.chdir(TASKS)  # where the tasks' data are

import lm_eval  # noqa: E402 (it reads these variables)
from lm_eval.tasks import TaskManager  # noqa: E402


def asked(path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the answer of the cluster itself."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{SERVER}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def evaluated(batch_size: int) -> Any:
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{SERVER}/v1/completions",
            "model": asked("/v1/models")["data"][0]["id"],
            "tokenizer_backend": "huggingface",
            "tokenizer": MODEL_FOLDER,
            "max_length": 512,
        },
        tasks=["pdserve_choices", "pdserve_continuations"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
        log_samples=True,
    )


def likelihoods(found: Any) -> list[tuple[float, bool]]:
    samples = found["samples"]["pdserve_choices"]
    return [(float(one[0][0]), str(one[0][1]) == "True") for s in samples for one in s["resps"]]


one_by_one, together = evaluated(1), evaluated(4)
choices, continuations = (
    one_by_one["results"][f"pdserve_{name}"] for name in ("choices", "continuations")
)
assert choices["acc,none"] >= 0.75, choices
assert continuations["exact_match,stripped"] >= 0.5, continuations
assert likelihoods(together) == likelihoods(one_by_one), "a batch changes log-likelihoods"
assert together["results"]["pdserve_choices"]["acc,none"] == choices["acc,none"]

# What the model itself answers is greedy, and as likely as it said when it answered.
(said,) = asked(
    "/v1/completions",
    {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 1},
)["choices"]
whole = asked(
    "/v1/completions",
    {
        "prompt": f"Once upon a time{said['text']}",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
    },
)["choices"][0]["logprobs"]
num_said = len(said["logprobs"]["tokens"])
assert whole["tokens"][-num_said:] == said["logprobs"]["tokens"]
assert whole["token_logprobs"][-num_said:] == said["logprobs"]["token_logprobs"]
assert math.isclose(
    sum(whole["token_logprobs"][-num_said:]), sum(said["logprobs"]["token_logprobs"])
)
for own, top in zip(
    whole["token_logprobs"][-num_said:], whole["top_logprobs"][-num_said:], strict=True
):
    assert own == max(top.values()), "what was drawn greedily is not the likeliest"
print(
    f"acc {choices['acc,none']:.3f}, exact_match {continuations['exact_match,stripped']:.3f}",
    flush=True,
)
