"""The settings of the router's HTTP API."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.settings.setting import Problem, Section, setting

# Extensions of browsers and desktop programs have schemes of their own, and hosts in any case.
_ORIGIN = re.compile(r"https?://[a-z0-9.:\[\]-]+|(?!https?:)[a-z][a-z0-9+.-]*://[A-Za-z0-9.:_-]+")
_WITH_DEFAULT_PORT = re.compile(r"(http://.*):80|(https://.*):443")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig(Section):
    """The router's HTTP API."""

    api_key: str = setting(
        "", "when set, clients must send this key as a bearer token", is_secret=True, metavar="KEY"
    )
    prefix_sharing: str = setting(
        "key",
        "which requests may use each other's cached KV",
        note="key: those of one API key, and all that have none; none: no two; all: every two; a "
        "request's cache_salt divides them further",
        one_of=("key", "none", "all"),
    )
    tls_cert: str = setting(
        "",
        "certificate with its chain (PEM) of the HTTP port, which then speaks HTTPS alone",
        metavar="FILE",
    )
    tls_key: str = setting(
        "", "key (PEM) of tls_cert; both files are read again when they change", metavar="FILE"
    )
    request_timeout_s: float = setting(
        600.0, "maximum time of a request", unit="seconds", above=0, at_most=86400
    )
    max_body: int = setting(10 << 20, "largest request body", unit="bytes", at_least=1024)
    cors_origins: str = setting(
        "",
        "web pages that may call the API: their origins, separated by commas, or *",
        metavar="ORIGINS",
    )
    strict_fields: bool = setting(
        False, "refuse requests with unknown fields instead of ignoring these fields"
    )
    tool_template: str = setting(
        "auto",
        "chat template of requests with tools: a file, or builtin (plain text, for any model)",
        note="auto: the model's own, where it writes calls in a known format, else builtin",
        metavar="FILE",
    )
    tool_format: str = setting(
        "auto",
        "how the model writes calls of tools",
        note="auto: as its chat template says",
        one_of=(
            "auto",
            "hermes",
            "llama3_json",
            "qwen3_coder",
            "seed_oss",
            "glm45",
            "glm47",
            "mistral",
            "mistral_args",
            "deepseek_v3",
            "deepseek_v31",
            "minimax_m2",
            "granite",
            "fenced",
        ),
    )
    reasoning_format: str = setting(
        "auto",
        "how the model marks its reasoning",
        note="think: between <think> and </think>, or the tags of Seed-OSS or Magistral where the "
        "chat template has these; auto: think where the template has any of them, else none",
        one_of=("auto", "think", "none"),
    )
    max_concurrent_requests: int = setting(
        1024, "maximum number of requests in progress; the router answers more with 429", at_least=1
    )
    max_connections: int = setting(
        4096, "maximum number of connections; beyond it idle ones close", between=(1, 1_000_000)
    )

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The origins as browsers name them: without a default port."""
        listed = (part.strip() for part in self.cors_origins.split(","))
        found = [(_WITH_DEFAULT_PORT.fullmatch(origin), origin) for origin in listed if origin]
        return tuple(match[1] or match[2] if match else origin for match, origin in found)

    def joint_problems(self) -> list[Problem]:
        """Return those of origins, or of a certificate without its key, or the other way round."""
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                return [
                    Problem(
                        ("cors_origins",),
                        f"cors_origins has {origin!r}: wanted origins such as "
                        "https://chat.example.org or app://obsidian.md, without a path, or *",
                    )
                ]
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, one) and not getattr(self, other):
                return [Problem((one, other), f"{one} is set: wanted {other} too")]
        return []
