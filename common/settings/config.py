"""The configuration of one process: frozen, validated as a whole, read once at the edge.

Each field declares its help text and the values that it may have, so that flags, `PDSERVE_…`
variables, the TOML file, `--help` and error messages come from one place. The first line of a
section's docstring is its title in `--help`. `problems()` returns every broken rule, not only the
first; each names all values that enter it and what would satisfy it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields

from common.kv.kv_layout import DTYPE_BYTES
from common.kv.token_budget import num_speculative_tokens, tokens_per_seq
from common.model_names import MOST_NAMES, are_model_names
from common.nodes import Role
from common.settings.api_config import ApiConfig
from common.settings.handoff_config import NODE_ID, HandoffConfig
from common.settings.redis_url import parse_redis_url
from common.settings.scaling_config import ScalingConfig
from common.settings.scheduling_config import SchedulingConfig, SpeculationConfig
from common.settings.setting import POWER_OF_TWO, SHARE, FormRule, Problem, Section, setting
from common.settings.tracing_config import TracingConfig

__all__ = [
    "ApiConfig",
    "Config",
    "EngineConfig",
    "HandoffConfig",
    "ModelConfig",
    "PlacementConfig",
    "ScalingConfig",
    "SchedulingConfig",
    "SecurityConfig",
    "ServerConfig",
    "SpeculationConfig",
    "TracingConfig",
]


def _is_redis_url(url: str) -> bool:
    try:
        parse_redis_url(url)
    except ValueError:
        return False
    return True


def _is_host(host: str) -> bool:
    try:
        return not host or not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None


_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
MOST_DRAIN_S = 3600
_PORTS = (0, 65535)
_ADVERTISED = FormRule("a host name or an IP address, without port and brackets", _is_host)
_MODEL_NAMES = FormRule(
    f"at most {MOST_NAMES} different names, separated by commas", are_model_names
)
_CHECKPOINT = FormRule("a Hugging Face folder or a .gguf file", bool)
_MODEL_LEN = FormRule("0, or 16 or more", lambda length: length == 0 or length >= 16)
_KV_CACHE_MEMORY = FormRule("0, or 1MiB or more", lambda size: size == 0 or size >= 1 << 20)
_GPUS = FormRule(
    "numbers separated by commas",
    lambda text: not text or all(part.isdecimal() for part in text.split(",")),
)
_REDIS_URL = FormRule(
    "redis://host:port/db, rediss://…, redis+sentinel://host,host/service, "
    "redis+cluster://host,host or unix://…",
    _is_redis_url,
)
_IDENTIFIER = FormRule("letters, digits and underscores", str.isidentifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Section):
    """Where this process listens, and what it logs."""

    host: str = setting("127.0.0.1", "address to listen on", metavar="HOST")
    advertise_host: str = setting(
        "",
        "name or address under which routers and other nodes reach this node",
        note="default: host, or this machine's name where host is 0.0.0.0 or ::",
        form=_ADVERTISED,
        metavar="HOST",
    )
    port: int = setting(
        0,
        "HTTP port of a router, gRPC port of a node",
        note="0: 8000 for a router, any free port for a node",
        between=_PORTS,
    )
    kv_port: int = setting(0, "KV port of a node", note="0: any free port", between=_PORTS)
    kv_host: str = setting(
        "",
        "address that the KV port listens on, where KV has its own network",
        note="default: host",
        metavar="HOST",
    )
    kv_advertise: str = setting(
        "",
        "name or address under which other nodes reach the KV port",
        note="default: kv_host where that is set, else advertise_host",
        form=_ADVERTISED,
        metavar="HOST",
    )
    metrics_port: int = setting(
        0, "HTTP port of a node's Prometheus metrics", note="0: any free port", between=_PORTS
    )
    node_id: str = setting(
        "", "stable name of this node", note="default: role, machine name and port", form=NODE_ID
    )
    log_level: str = setting(
        "info", "least severe level that is logged", one_of=("debug", "info", "warning", "error")
    )
    log_format: str = setting("human", "how log lines are written", one_of=("human", "json"))
    drain_timeout_s: float = setting(
        30.0,
        "time for running requests while draining; a node then hands them over, a router ends them",
        note="default of a router: request_timeout_s, at most an hour",
        unit="seconds",
        between=(0, MOST_DRAIN_S),
    )
    stay_drained: bool = setting(
        False, "after `pdserve drain`, a node does not exit, but waits for SIGTERM"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """Which model is served."""

    model: str = setting("", "checkpoint", form=_CHECKPOINT, metavar="PATH")
    served_model_name: str = setting(
        "",
        "name in the API, or several that requests may use",
        note="default: the checkpoint's name",
        form=_MODEL_NAMES,
        metavar="NAMES",
    )
    dtype: str = setting(
        "auto", "compute type", note="auto: float32 on a CPU", one_of=("auto", *DTYPE_BYTES)
    )
    activation_dtype: str = setting(
        "auto",
        "what products with quantised weights compute in",
        note="auto: int8 in the CPU kernels, each row in groups of 32, faster and less exact",
        one_of=("auto", "float32", "int8"),
    )
    load_format: str = setting(
        "auto",
        "where the weights come from",
        note="auto: the checkpoint's files; random: made up in the shapes of config.json, the same "
        "on every node, for sizing and measuring: files of weights are not read",
        one_of=("auto", "random"),
    )
    quantization: str = setting(
        "none",
        "quantise wide weights while they are loaded, embedding and head in 8 bits",
        one_of=("none", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    )
    max_model_len: int = setting(
        0, "longest prompt and output in tokens", note="0: what the model allows", form=_MODEL_LEN
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Section):
    """Budgets and memory of a node."""

    max_num_seqs: int = setting(32, "maximum number of running sequences", between=(1, 4096))
    max_num_batched_tokens: int = setting(
        8192, "maximum number of tokens that one step computes", at_least=1
    )
    block_size: int = setting(64, "tokens per KV block", form=POWER_OF_TWO, at_most=1024)
    memory_fraction: float = setting(
        0.0,
        "share of memory that a node takes: of the GPU, or on a CPU of the machine or container",
        note="0: 0.9 of a GPU or of a container's limit, 0.3 of a machine",
        between=SHARE,
    )
    kv_cache_memory: int = setting(
        0,
        "memory of the KV cache, such as 512MiB",
        note="0: what the largest step leaves of memory_fraction",
        unit="bytes",
        form=_KV_CACHE_MEMORY,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "format of the numbers in the KV cache",
        note="auto: as computed; int8: a byte, and a scale per token and head",
        one_of=("auto", "float32", "bfloat16", "int8"),
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV of prompts with a common start")
    prefix_host_memory: int = setting(
        0,
        "host memory for prefixes that the KV cache evicts, such as 4GiB",
        note="0: none; one pool with swap_space, in which swapped requests go first",
        unit="bytes",
        at_least=0,
    )
    prefix_disk: str = setting(
        "",
        "folder for prefixes that prefix_host_memory evicts, such as /var/cache/pdserve",
        note="default: none; kept over restarts, shared by nodes of one host and user",
        metavar="DIR",
    )
    prefix_disk_size: int = setting(
        0,
        "maximum size of this node's files in prefix_disk, such as 100GiB",
        unit="bytes",
        at_least=0,
    )
    prefix_disk_encryption: bool = setting(
        False, "encrypt the files in prefix_disk with the KV key, of kv_key or keys"
    )
    attention_backend: str = setting(
        "auto", "what computes the model", one_of=("auto", "numba", "paddle", "triton")
    )
    gpus: str = setting(
        "",
        "NVIDIA GPUs to compute on, such as 0,1",
        note="a node takes the first, up divides them among its nodes; default: the first there is",
        form=_GPUS,
        metavar="NUMBERS",
    )
    num_threads: int = setting(
        0,
        "CPU threads of the engine",
        note="0: all cores, or a container's limit; with up one, if nodes outnumber them",
        at_least=0,
    )

    def joint_problems(self) -> list[Problem]:
        """Return every broken rule about several settings."""
        problems = []
        if self.prefix_host_memory and not self.enable_prefix_caching:
            wanted = "0, because no prefix is reused"
            problems.append(self.conflict("prefix_host_memory", wanted, "enable_prefix_caching"))
        if self.prefix_disk and not self.prefix_host_memory:
            wanted = "empty, because what is on disk passes host memory"
            problems.append(self.conflict("prefix_disk", wanted, "prefix_host_memory"))
        if bool(self.prefix_disk) != bool(self.prefix_disk_size):
            wanted = (
                "a size of 1MiB or more" if self.prefix_disk else "0, because there is no folder"
            )
            problems.append(self.conflict("prefix_disk_size", wanted, "prefix_disk"))
        if self.prefix_disk_encryption and not self.prefix_disk:
            wanted = "false, because there are no files"
            problems.append(self.conflict("prefix_disk_encryption", wanted, "prefix_disk"))
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig(Section):
    """Which node runs a request."""

    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "address of the placement store: a Redis, its Sentinels, or nodes of a Redis Cluster",
        form=_REDIS_URL,
        metavar="URL",
    )
    cluster: str = setting(
        "default", "name of the cluster, when several share one Redis", form=_IDENTIFIER
    )
    node_lease_s: float = setting(
        5.0, "time until a silent node counts as gone", unit="seconds", between=(0.2, 600)
    )
    placement_policy: str = setting(
        "prefix_affinity",
        "how a router chooses nodes",
        one_of=("round_robin", "least_loaded", "prefix_affinity"),
    )
    session_ttl_s: float = setting(
        1800.0,
        "how long a router remembers which nodes served a session",
        note="from its last request on; 0: sessions are not kept together",
        unit="seconds",
        between=(0, 604800),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig(Section):
    """What protects this process from others on the network."""

    keys: str = setting(
        "",
        "this process's folder made by `pdserve keys init`: DIR/router or DIR/node",
        metavar="DIR",
    )
    insecure: bool = setting(
        False, "let others reach this process without keys, on a network where all are trusted"
    )
    open_api: bool = setting(
        False,
        "serve clients of a router without an API key although `keys` has some; draining a node "
        "still needs an administrator's",
    )


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
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def problems(self) -> list[Problem]:
        """Return every broken rule; none when the configuration can start."""
        sections = [getattr(self, one.name) for one in fields(self) if one.name != "role"]
        wrong = [problem for section in sections for problem in section.problems()]
        return wrong + self.joint_problems()

    def joint_problems(self) -> list[Problem]:
        """Return every broken rule about the role, or about settings of several sections."""
        wrong = self._port_problems() + self._warm_problems() + self._record_problems()
        return wrong + self._budget_problems()

    def _port_problems(self) -> list[Problem]:
        """Return the ports of a node that are the same on one address: the second cannot open."""
        server = self.server
        if self.role is Role.ROUTER:
            return []
        places: dict[tuple[str, int], str] = {}
        wrong = []
        for key, host in (
            ("port", server.host),
            ("kv_port", server.kv_host or server.host),
            ("metrics_port", server.host),
        ):
            port = getattr(server, key)
            first = places.setdefault((host, port), key)
            if port and first != key:
                text = f"{key} is {port}, as {first} is: wanted another port, or 0 for any free one"
                wrong.append(Problem((key, first), text))
        return wrong

    def _warm_problems(self) -> list[Problem]:
        if not self.handoff.warm_from or self.engine.enable_prefix_caching:
            return []
        text = "warm_from is set: wanted empty, with enable_prefix_caching = False"
        return [Problem(("warm_from", "enable_prefix_caching"), text)]

    def _record_problems(self) -> list[Problem]:
        """Return what a node decides by and a recording has not: tokens, and files of others."""
        method, disk = self.speculation.speculative_method, self.engine.prefix_disk
        if not self.tracing.record or self.role is Role.ROUTER:
            return []
        wrong = []
        if method not in ("none", "grammar"):
            text = f"wanted empty, with speculative_method = {method}, which looks at tokens"
            wrong.append(Problem(("record", "speculative_method"), f"record is set: {text}"))
        if disk:
            text = "record is set: wanted empty, with prefix_disk, whose files are not recorded"
            wrong.append(Problem(("record", "prefix_disk"), text))
        return wrong

    def _budget_problems(self) -> list[Problem]:
        """Return the broken rules between sections. Values that enter them must be right first."""
        engine, scheduling, speculation = self.engine, self.scheduling, self.speculation
        if engine.problems() or scheduling.problems() or speculation.problems():
            return []
        wrong = []
        budget, granularity = engine.max_num_batched_tokens, scheduling.chunk_granularity
        if granularity > engine.block_size:
            wrong.append(
                Problem(
                    ("chunk_granularity", "block_size"),
                    f"chunk_granularity is {granularity}: wanted at most "
                    f"block_size = {engine.block_size}",
                )
            )
        if self.role is Role.PREFILL and budget < granularity:
            wrong.append(
                Problem(
                    ("max_num_batched_tokens", "chunk_granularity"),
                    f"max_num_batched_tokens is {budget}: wanted at least "
                    f"chunk_granularity = {granularity}, one chunk",
                )
            )
        if self.role in (Role.DECODE, Role.MIXED):
            wrong += self._decode_budget_problems()
        return wrong

    def _decode_budget_problems(self) -> list[Problem]:
        """Return what a step cannot hold: every sequence's token with its drafts, and a chunk.

        A decode node computes prompts too: short ones, and those of preempted sequences.
        """
        budget, seats = self.engine.max_num_batched_tokens, self.engine.max_num_seqs
        granularity = self.scheduling.chunk_granularity
        method = self.speculation.speculative_method
        drafts = num_speculative_tokens(method, self.speculation.num_speculative_tokens)
        per_seq = tokens_per_seq(method, self.speculation.num_speculative_tokens)
        keys = ["max_num_batched_tokens", "max_num_seqs", "speculative_method"]
        entered = f"max_num_seqs = {seats} sequences of 1 token (speculative_method = {method})"
        if drafts:
            keys.insert(2, "num_speculative_tokens")
            entered = (
                f"max_num_seqs = {seats} sequences of {per_seq} tokens (1 and "
                f"num_speculative_tokens = {drafts} of speculative_method = {method})"
            )
        wrong = []
        if budget < seats * per_seq:
            fewer = f", or max_num_seqs at most {budget // per_seq}" if budget >= per_seq else ""
            text = (
                f"max_num_batched_tokens is {budget}: wanted at least {seats * per_seq} for "
                f"{entered}{fewer}"
            )
            wrong.append(Problem(tuple(keys), text))
        if granularity > per_seq and budget < (seats - 1) * per_seq + granularity:
            most = (budget - granularity) // per_seq + 1
            fewer = f", or max_num_seqs at most {most}" if most > 0 else ""
            text = (
                f"max_num_batched_tokens is {budget}: wanted at least "
                f"{(seats - 1) * per_seq + granularity} for all but one of {entered}, and a "
                f"chunk of chunk_granularity = {granularity} tokens for the last{fewer}"
            )
            wrong.append(Problem((*keys, "chunk_granularity"), text))
        return wrong
