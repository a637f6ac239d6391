"""The configuration of one process: frozen, validated as a whole, read once at the edge.

Every field's metadata carries its help text, so flags, `PDSERVE_…` variables, the TOML file and
`--help` come from one place. `problems()` returns every violated rule, not only the first; each
names all values that enter it and what would satisfy it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from common.nodes import Role
from common.scheduling_config import SchedulingConfig, SpeculationConfig
from common.security_config import SecurityConfig
from common.setting import must_be_one_of, setting
from common.token_budget import num_speculative_tokens, tokens_per_seq
from common.tracing_config import TracingConfig

__all__ = [
    "ApiConfig",
    "Config",
    "EngineConfig",
    "HandoffConfig",
    "ModelConfig",
    "PlacementConfig",
    "SchedulingConfig",
    "SecurityConfig",
    "ServerConfig",
    "SpeculationConfig",
    "TracingConfig",
]

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held."""

    model: str = setting("", "checkpoint: a Hugging Face folder or a .gguf file")
    served_model_name: str = setting("", "name in the API (default: the checkpoint's name)")
    dtype: str = setting(
        "auto", "compute type: auto, float32, float16 or bfloat16 (auto: float32 on a CPU)"
    )
    max_model_len: int = setting(0, "longest prompt + output in tokens (0: what the model allows)")

    def problems(self) -> list[str]:
        wrong = []
        if self.dtype not in ("auto", "float32", "float16", "bfloat16"):
            wrong.append(f"dtype is {self.dtype!r}: wanted auto, float32, float16 or bfloat16")
        if self.max_model_len != 0 and self.max_model_len < 16:
            wrong.append(f"max_model_len is {self.max_model_len}: wanted 0 or at least 16")
        return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's budgets and its memory."""

    max_num_seqs: int = setting(32, "most sequences that run at once")
    max_num_batched_tokens: int = setting(8192, "most tokens one step may compute")
    block_size: int = setting(64, "tokens per KV block")
    kv_cache_memory: int = setting(GIB, "bytes of KV cache, e.g. 512MiB or 2GiB", unit="bytes")
    enable_prefix_caching: bool = setting(True, "reuse the KV of prompts with a common start")
    attention_backend: str = setting("auto", "auto, paddle, numba or fused")
    num_threads: int = setting(0, "CPU threads of the engine (0: all cores)")

    def problems(self) -> list[str]:
        wrong = []
        if not 1 <= self.max_num_seqs <= 4096:
            wrong.append(f"max_num_seqs is {self.max_num_seqs}: wanted 1 to 4096")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            wrong.append(f"block_size is {self.block_size}: wanted a power of two")
        if self.block_size > 1024:
            wrong.append(f"block_size is {self.block_size}: wanted at most 1024")
        if self.max_num_batched_tokens < 1:
            wrong.append(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: wanted 1 or more"
            )
        if self.kv_cache_memory < 1 << 20:
            wrong.append(f"kv_cache_memory is {self.kv_cache_memory} bytes: wanted at least 1MiB")
        if self.attention_backend not in ("auto", "paddle", "numba", "fused"):
            wrong.append(
                f"attention_backend is {self.attention_backend!r}: "
                "wanted auto, paddle, numba or fused"
            )
        if self.num_threads < 0:
            wrong.append(f"num_threads is {self.num_threads}: wanted 0 (all cores) or more")
        return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How prompts move from a prefill node to a decode node."""

    local_prefill_threshold: int = setting(
        64, "a decode node prefills prompts with at most this many uncached tokens itself"
    )
    lease_s: float = setting(30.0, "a reservation without progress expires after this", unit="s")
    kv_window: int = setting(
        32 << 20, "most unacknowledged KV bytes from one prefill to one decode node", unit="bytes"
    )
    kv_transport: str = setting(
        "auto", "how KV travels: auto, shm, rdma or zmq (auto: shm on one host, rdma, zmq)"
    )
    kv_verify: str = setting(
        "auto", "KV checksums: off, commit, block or auto (auto: block, but off for rdma)"
    )
    rdma_devices: str = setting("", "RDMA devices, separated by commas (default: all)")
    kv_key: str = setting(
        "", "file of `pdserve kv-key`, the same on all nodes: encrypts KV over zmq"
    )
    max_queued_requests: int = setting(256, "requests waiting on a node before it refuses more")

    def problems(self) -> list[str]:
        wrong = []
        if self.local_prefill_threshold < 0:
            wrong.append(
                f"local_prefill_threshold is {self.local_prefill_threshold}: wanted 0 or more"
            )
        if not 0.1 <= self.lease_s <= 3600:
            wrong.append(f"lease_s is {self.lease_s}: wanted 0.1 to 3600 seconds")
        if self.kv_window < 1 << 16:
            wrong.append(f"kv_window is {self.kv_window} bytes: wanted at least 64KiB")
        if self.kv_transport not in ("auto", "shm", "rdma", "zmq"):
            wrong.append(f"kv_transport is {self.kv_transport!r}: wanted auto, shm, rdma or zmq")
        if self.kv_verify not in ("auto", "off", "commit", "block"):
            wrong.append(f"kv_verify is {self.kv_verify!r}: wanted auto, off, commit or block")
        if self.max_queued_requests < 1:
            wrong.append(f"max_queued_requests is {self.max_queued_requests}: wanted at least 1")
        return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """The placement store and the policy that chooses nodes."""

    redis_url: str = setting("redis://127.0.0.1:6379/0", "placement store: redis://host:port/db")
    cluster: str = setting("default", "clusters on one Redis are told apart by this name")
    node_lease_s: float = setting(5.0, "a silent node is gone after this", unit="s")
    placement_policy: str = setting(
        "prefix_affinity", "round_robin, least_loaded or prefix_affinity"
    )

    def problems(self) -> list[str]:
        wrong = []
        if not _is_redis_url(self.redis_url):
            wrong.append(
                f"redis_url is {self.redis_url!r}: wanted redis://host:port/db, "
                "rediss://… or unix://…"
            )
        if not self.cluster.isidentifier():
            wrong.append(f"cluster is {self.cluster!r}: wanted letters, digits and underscores")
        if not 0.2 <= self.node_lease_s <= 600:
            wrong.append(f"node_lease_s is {self.node_lease_s}: wanted 0.2 to 600 seconds")
        if self.placement_policy not in ("round_robin", "least_loaded", "prefix_affinity"):
            wrong.append(
                f"placement_policy is {self.placement_policy!r}: "
                "wanted round_robin, least_loaded or prefix_affinity"
            )
        return wrong


def _is_redis_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading the port is what checks it.
        is_remote = parts.scheme in ("redis", "rediss") and parts.port != 0
    except ValueError:
        return False
    return is_remote or parts.scheme == "unix"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a process listens, and what it says."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "HTTP port of a router (0: 8000), gRPC port of a node (0: any free)")
    kv_port: int = setting(0, "KV port of a decode node (0: any free)")
    metrics_port: int = setting(0, "HTTP port of a node's Prometheus metrics (0: any free)")
    node_id: str = setting("", "stable name of this node (default: role, host and port)")
    log_level: str = setting("info", "debug, info, warning or error")
    log_format: str = setting("human", "human or json: how log lines are written")
    drain_timeout_s: float = setting(
        30.0, "after SIGTERM, what runs has this long before it is handed over", unit="s"
    )

    def problems(self) -> list[str]:
        wrong = []
        if not 0 <= self.drain_timeout_s <= 3600:
            wrong.append(f"drain_timeout_s is {self.drain_timeout_s}: wanted 0 to 3600 seconds")
        ports = {"port": self.port, "kv_port": self.kv_port, "metrics_port": self.metrics_port}
        for name, port in ports.items():
            if not 0 <= port <= 65535:
                wrong.append(f"{name} is {port}: wanted 0 to 65535")
        if self.log_level not in ("debug", "info", "warning", "error"):
            wrong.append(f"log_level is {self.log_level!r}: wanted debug, info, warning or error")
        wrong += must_be_one_of("log_format", self.log_format, ("human", "json"))
        if len(self.node_id) > 128:
            wrong.append(f"node_id has {len(self.node_id)} characters: wanted at most 128")
        return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """The router's HTTP edge."""

    api_key: str = setting("", "when set, clients must send it as a bearer token", secret=True)
    request_timeout_s: float = setting(600.0, "the one deadline of a request", unit="s")
    max_body: int = setting(10 << 20, "largest request body", unit="bytes")
    max_concurrent_requests: int = setting(1024, "requests in progress before the router says 429")
    max_connections: int = setting(4096, "HTTP connections at once; beyond that idle ones close")

    def problems(self) -> list[str]:
        wrong = []
        if not 0 < self.request_timeout_s <= 86400:
            wrong.append(
                f"request_timeout_s is {self.request_timeout_s}: wanted above 0, at most 86400"
            )
        if self.max_body < 1024:
            wrong.append(f"max_body is {self.max_body} bytes: wanted at least 1KiB")
        if self.max_concurrent_requests < 1:
            wrong.append(
                f"max_concurrent_requests is {self.max_concurrent_requests}: wanted at least 1"
            )
        if not 1 <= self.max_connections <= 1_000_000:
            wrong.append(f"max_connections is {self.max_connections}: wanted 1 to 1000000")
        return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything one process needs to know. Sections apply to the roles that use them."""

    role: Role
    server: ServerConfig = field(default_factory=ServerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def problems(self) -> list[str]:
        """Every violated rule, in words; empty when the configuration can start."""
        sections = (
            self.server,
            self.model,
            self.engine,
            self.scheduling,
            self.speculation,
            self.handoff,
            self.placement,
            self.api,
            self.security,
            self.tracing,
        )
        wrong = [problem for section in sections for problem in section.problems()]
        if not self.model.model:
            wrong.append("model is empty: wanted a Hugging Face folder or a .gguf file")
        return wrong + self._budget_problems()

    def _budget_problems(self) -> list[str]:
        """Rules between sections; whatever enters them must be right by itself first."""
        engine, scheduling, speculation = self.engine, self.scheduling, self.speculation
        if engine.problems() or scheduling.problems() or speculation.problems():
            return []
        wrong = []
        if scheduling.chunk_granularity > engine.block_size:
            wrong.append(
                f"chunk_granularity is {scheduling.chunk_granularity}: wanted at most "
                f"block_size = {engine.block_size}"
            )
        if self.role is Role.PREFILL and engine.max_num_batched_tokens < (
            scheduling.chunk_granularity
        ):
            wrong.append(
                f"max_num_batched_tokens is {engine.max_num_batched_tokens}: wanted at least "
                f"chunk_granularity = {scheduling.chunk_granularity}, one chunk"
            )
        if self.role in (Role.DECODE, Role.MIXED):
            wrong += self._decode_budget_problems()
        return wrong

    def _decode_budget_problems(self) -> list[str]:
        """A step holds every seat's token with its drafts, and beside them a chunk of a prompt.

        A decode node computes prompts too: short ones, and those of preempted sequences.
        """
        budget, seats = self.engine.max_num_batched_tokens, self.engine.max_num_seqs
        granularity = self.scheduling.chunk_granularity
        method = self.speculation.speculative_method
        drafts = num_speculative_tokens(method, self.speculation.num_speculative_tokens)
        per_seq = tokens_per_seq(method, self.speculation.num_speculative_tokens)
        entered = f"max_num_seqs = {seats} sequences of 1 token (speculative_method = {method})"
        if drafts:
            entered = (
                f"max_num_seqs = {seats} sequences of {per_seq} tokens (1 and "
                f"num_speculative_tokens = {drafts} of speculative_method = {method})"
            )
        wrong = []
        if budget < seats * per_seq:
            fewer = f", or max_num_seqs at most {budget // per_seq}" if budget >= per_seq else ""
            wrong.append(
                f"max_num_batched_tokens is {budget}: wanted at least {seats * per_seq} for "
                f"{entered}{fewer}"
            )
        if granularity > per_seq and budget < (seats - 1) * per_seq + granularity:
            most = (budget - granularity) // per_seq + 1
            fewer = f", or max_num_seqs at most {most}" if most > 0 else ""
            wrong.append(
                f"max_num_batched_tokens is {budget}: wanted at least "
                f"{(seats - 1) * per_seq + granularity} for all but one of {entered}, and a "
                f"chunk of chunk_granularity = {granularity} tokens for the last{fewer}"
            )
        return wrong
