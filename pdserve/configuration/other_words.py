"""Words of vLLM, SGLang, llama.cpp and Ollama, and what they are called here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.model_names import KNOWN_MODELS

_MORE_NODES = "a node computes on one device; `pdserve up --prefill N --decode M` runs more nodes"

_SCALED_POSITIONS = "config.json of the model says how its positions are scaled (docs/models.md)"

# A key of this project's settings, or a sentence.
SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("tensor-parallel-size", "tp-size", "tp", "pipeline-parallel-size", "pp-size"),
            *("data-parallel-size", "dp-size", "expert-parallel-size", "ep-size"),
        ),
        _MORE_NODES,
    ),
    **dict.fromkeys(
        ("rope-scaling", "rope-scale", "yarn-orig-ctx", "json-model-override-args", "hf-overrides"),
        _SCALED_POSITIONS,
    ),
    "gpu-memory-utilization": "memory_fraction",
    "mem-fraction-static": "memory_fraction",
    "num-gpu-blocks-override": "kv_cache_memory",
    "max-total-tokens": "kv_cache_memory",
    "kv-cache-memory-bytes": "kv_cache_memory",
    "page-size": "block_size",
    "max-running-requests": "max_num_seqs",
    "parallel": "max_num_seqs",
    "chunked-prefill-size": "max_num_batched_tokens",
    "batch-size": "max_num_batched_tokens",
    "context-length": "max_model_len",
    "ctx-size": "max_model_len",
    "model-path": "model",
    "alias": "served_model_name",
    "threads": "num_threads",
    "disable-radix-cache": "the prefix cache is switched off with --no-enable-prefix-caching",
    "enable-chunked-prefill": "prompts are always computed in chunks",
    "enforce-eager": "there are no graphs to capture",
    "trust-remote-code": "no code of a model is run",
    "speculative-config": "speculative_method",
    "speculative-algorithm": "speculative_method",
    "speculative-num-draft-tokens": "num_speculative_tokens",
    "speculative-draft-model-path": "speculative_model",
    "enable-auto-tool-choice": "tools need no flag",
    "tool-call-parser": "tool_format",
    "reasoning-parser": "reasoning_format",
    "chat-template": "the model's own is used; --tool-template names one for requests with tools",
    "tokenizer": "the tokenizer is read from the model's folder",
    "lora-modules": "there are no LoRA adapters",
    "enable-lora": "there are no LoRA adapters",
    "allowed-origins": "cors_origins",
    "ssl-keyfile": "tls_key",
    "ssl-certfile": "tls_cert",
    "uvicorn-log-level": "log_level",
    "scheduling-policy": "enable_priority_scheduling",
    "disaggregation-mode": "the roles are `pdserve serve --role prefill` and `--role decode`",
    "kv-transfer-config": "the roles are `pdserve serve --role prefill` and `--role decode`",
    "disaggregation-transfer-backend": "kv_transport",
    "dist-init-addr": "redis_url",
    "download-dir": "the variable PDSERVE_CACHE names the folder of fetched models",
}

_PROGRAM = "pdserve"

COMMANDS: Mapping[str, str] = {
    "run": "`pdserve up --model MODEL` runs a cluster, and `pdserve chat` talks to it",
    "launch": "`pdserve up --model MODEL` runs a cluster",
    "launch_server": "`pdserve up --model MODEL` runs a cluster",
    "start": "`pdserve up --model MODEL` runs a cluster",
    "pull": f"`pdserve up --model NAME` fetches one of {', '.join(KNOWN_MODELS)}; other models are "
    "folders of the Hugging Face Hub, or .gguf files",
    "ps": "`pdserve status` shows what runs",
    "list": "`pdserve status` shows what is served",
    "show": "`pdserve status` shows what is served",
    "stop": "Ctrl-C ends `pdserve up`, and `pdserve drain NODE_ID` one node",
    "complete": "`pdserve chat` talks to a running cluster",
    "bench": "docs/figures.md has the commands of all measurements",
}

# Of commands that ask a router, which they find by --url.
CLIENT_FLAGS: Mapping[str, str] = {"--port": "--url", "--host": "--url"}


def setting_hint(name: str, known: Iterable[str]) -> str:
    """Return what to write instead of a flag, variable or key: ": …" in the form of `known` ones.

    "" where no other tool has such a setting, or the command chooses what it is here itself.
    """
    word = SETTINGS.get(_spelt(name).replace("_", "-"))
    if word is None:
        return ""
    if not word.isidentifier():
        return f": {word}"
    ours = {_spelt(one): one for one in known}.get(word)
    return f": it is {ours} here" if ours else ""


def _spelt(name: str) -> str:
    return name.lower().lstrip("-").removeprefix("pdserve_").replace("-", "_")


def command_hint(word: str, commands: Iterable[str], program: str) -> str:
    """Return what to type instead of the command `word` of `program`: "; …", or ""."""
    if program == _PROGRAM and word in COMMANDS:
        return f"; {COMMANDS[word]}"
    if program == _PROGRAM and is_model(word):
        return f"; `pdserve up --model {word}` runs a cluster"
    close = difflib.get_close_matches(word, list(commands), n=1, cutoff=0.6)
    return f"; did you mean `{program} {close[0]}`?" if close else ""


def is_model(word: str) -> bool:
    """Return whether a person who types `word` alone most likely means a model."""
    return word in KNOWN_MODELS or word.endswith(".gguf") or "/" in word or Path(word).is_dir()


def flag_hint(flag: str, offered: Iterable[str]) -> str:
    """Return what to type instead of a flag of a command without settings, or ""."""
    offered = list(offered)
    meant = CLIENT_FLAGS.get(flag)
    if meant not in offered:
        meant = next(iter(difflib.get_close_matches(flag, offered, n=1, cutoff=0.6)), None)
    return f": did you mean {meant}?" if meant else ""
