"""`docs/limits.md` states the bounds that the code has, and every one of them once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from common import prompt_logprobs
from common.errors import InvalidRequest
from common.grammar import MAX_GRAMMAR_BYTES
from common.request import MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_TOKEN_IDS
from common.settings.config import ApiConfig, HandoffConfig, PlacementConfig
from engine.prefix_disk import block_folder
from engine.runner.grammars import compiling
from grammars import kept
from grammars.bounds import (
    MAX_DEPTH,
    MAX_EMBEDDED,
    MAX_MULTIPLE,
    MAX_OPTIONAL,
    MAX_PATTERNS,
)
from grammars.gbnf import MAX_GBNF_CHARS, MAX_GBNF_RULES, MAX_GBNF_WORK
from grammars.numbers.exact_numbers import GREATEST_INTEGER, LEAST_INTEGER, MAX_EXACT, MAX_OPEN
from grammars.trying import queue
from grammars.trying.server import MAX_TRIAL_S
from grammars.trying.trial import NODE_LIMITS, ROUTER_LIMITS, TrialLimits
from grammars.weaker_schemas import MAX_TRIED_CHARS, MAX_TRIES
from http_serving.bounded_connections import ConnectionLimits
from kv_transfer.lanes.rdma import rdma_lane, read_lane
from kv_transfer.shared import limits as kv
from kv_transfer.zmq.transport import RECEIVER_HIGH_WATER_MARK
from node.control import block_reports, control_port, output_streams, router_calls
from node.control.control_service import GREETING_TIMEOUT_S, MAX_MESSAGE_BYTES
from node.flow import inbox
from node.watch import metrics_server
from placement.records import MAX_VALUE_BYTES
from placement.redis_store import CALL_TIMEOUT_S, MAX_ENTRIES
from protos.codec import MAX_ID_LENGTH
from router.access import api_keys, arriving_bodies, middleware
from router.api import tokenization
from router.api.bodies import chat_messages, json_text, tool_fields, unknown_fields
from router.api.bodies.schemas import MAX_SESSION_CHARS, CompletionBody, parse_body
from router.api.exchanges import ADMIN_SEATS
from router.api.planning import body_planner, process
from router.api.planning.choices import MAX_ANSWER_LOGPROBS, MAX_CHOICES, MAX_REPEATED_TOKENS
from router.api.sessions import MAX_SESSION_BYTES
from router.cluster import admin_calls
from router.core.known import block_index
from router.core.known.sessions import MAX_SESSIONS
from router.core.membership import MAX_NODES
from router.http import server as http_server
from router.http.routes import Access
from router.live import feed
from router.text.chat.conversation import MAX_TEMPLATE_BYTES
from router.text.output.stop_strings import MAX_STOP_CHARS, MAX_STOP_STRINGS
from router.tools.formats import HERMES, LLAMA_JSON
from router.tools.harmony.header import MAX_HEADER_CHARS
from tests.support.http.http_edge import declared_routes, make_edge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
API, HANDOFF = ApiConfig(), HandoffConfig()


def size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def deepest_body() -> int:
    """How many lists inside of one another the parser takes, in a field of the body."""
    for depth in range(1, 10_000):
        nested = "[" * depth + "]" * depth
        body = f'{{"model": "m", "prompt": "p", "metadata": {nested}}}'.encode()
        try:
            parse_body(CompletionBody, json_text.checked_text(body))
        except InvalidRequest:
            return depth - 1
    raise AssertionError("nesting is not bounded")


def connection_limits(limits: ConnectionLimits, flag: str = "") -> dict[str, str]:
    return {
        "connections at once": f"{limits.max_connections}{flag}",
        "request line and headers": size(limits.max_head_bytes),
        "headers of a request": str(limits.max_headers),
        "time until a request is whole, body included": f"{limits.request_timeout_s:g} s",
        "time without a request": f"{limits.idle_timeout_s:g} s",
        "time to read the last answer, or to send the rest of a body that was refused": (
            f"{limits.leaving_timeout_s:g} s"
        ),
    }


def longest_request_id() -> int:
    return max(n for n in range(1, 1000) if middleware.GOOD_REQUEST_ID.fullmatch(b"x" * n))


def trial_limits(limits: TrialLimits) -> dict[str, str]:
    return {
        "to compile a grammar": (
            f"{limits.cpu_s} s of CPU, {size(limits.memory_bytes)} of memory, "
            f"{size(limits.stack_bytes)} of stack"
        ),
        "memory of a compiled grammar": size(limits.compiled_bytes),
    }


ROUTER = {
    **connection_limits(http_server.router_limits(API.max_connections), " (`--max-connections`)"),
    "path": "as in `/openapi.json`; only the name of a model may have escaped slashes",
    "body": f"{size(API.max_body)} (`--max-body`)",
    "objects and lists in a body": str(json_text.MAX_JSON_CONTAINERS),
    "fields in the objects of a body": str(json_text.MAX_JSON_MEMBERS),
    "texts in a body, names of fields included": str(json_text.MAX_JSON_TEXTS),
    "commas in a body, outside of texts": str(json_text.MAX_JSON_COMMAS),
    "nesting of a field of a body": f"{deepest_body()} levels",
    f"bodies over {size(body_planner.MAX_THREAD_BODY_BYTES)} that wait to be planned": (
        f"{size(process.MAX_WAITING_BYTES)} together"
    ),
    "time to plan such a body": f"{process.MAX_PLAN_S:g} s",
    "body of `/detokenize`": size(tokenization.MAX_DETOKENIZE_BYTES),
    "body of `/v1/cluster/drain` and `/v1/cluster/role`": size(admin_calls.MAX_BODY_BYTES),
    "`chat_template_kwargs`": str(chat_messages.MAX_VARIABLES),
    "characters of a name or a value in them": str(chat_messages.MAX_VARIABLE_CHARS),
    "`tools`": str(tool_fields.MAX_TOOLS),
    "characters of a function's name": str(tool_fields.MAX_NAME_CHARS),
    "characters of a header in an answer in harmony": str(MAX_HEADER_CHARS),
    "levels of objects and lists in the `parameters` of a function": str(
        tool_fields.MAX_SCHEMA_DEPTH
    ),
    "levels of objects and lists in the arguments of an earlier call": str(
        chat_messages.MAX_ARGUMENTS_DEPTH
    ),
    "calls of one answer": (f"{HERMES.most_calls}; {LLAMA_JSON.most_calls} in Llama 3's format"),
    "a tool template (`--tool-template`)": size(MAX_TEMPLATE_BYTES),
    "unknown fields of a request that are logged, and kinds of parts that are left out": (
        f"{unknown_fields.MAX_IGNORED}, with {unknown_fields.MAX_FIELD_CHARS} characters each; "
        f"{unknown_fields.MAX_NAMES} in all"
    ),
    "bodies that arrive at once, together": (
        f"{arriving_bodies.MAX_BODIES}, {size(arriving_bodies.MAX_BYTES)}"
    ),
    "requests in progress": (
        f"{API.max_concurrent_requests} (`--max-concurrent-requests`); "
        f"{ADMIN_SEATS} more of administrators"
    ),
    "viewers of the live page": (
        f"{feed.MAX_VIEWERS}, {feed.MAX_VIEWERS_PER_KEY} of one key; "
        "one place is kept for administrators"
    ),
    "time of a request": f"{API.request_timeout_s:g} s (`--request-timeout-s`)",
    "choices: `n` times the number of prompts": str(MAX_CHOICES),
    "wait in a node's queue, with `--shed`": "what the request's time allows",
    "`stop` strings": str(MAX_STOP_STRINGS),
    "characters of a `stop` string": str(MAX_STOP_CHARS),
    "`stop_token_ids`": str(MAX_STOP_TOKEN_IDS),
    "`logprobs`, `top_logprobs`, `prompt_logprobs`": str(MAX_LOGPROBS),
    "log probabilities of the prompts of a request": f"{prompt_logprobs.MAX_ENTRIES:,}",
    "log probabilities of an answer: choices times `max_tokens` times (1 + likeliest tokens)": (
        f"{MAX_ANSWER_LOGPROBS:,}"
    ),
    "tokens of prompts that choices repeat, with `echo` or `return_token_ids`": (
        f"{MAX_REPEATED_TOKENS:,}"
    ),
    "schema, regular expression or grammar, in UTF-8; of tools together, without `title` and "
    "`description`": f"{MAX_GRAMMAR_BYTES >> 10} KiB",
    "a grammar in GBNF": f"{MAX_GBNF_CHARS} characters, {MAX_GBNF_RULES} rules, "
    f"{MAX_GBNF_WORK} characters times rules",
    "levels of a schema": str(MAX_DEPTH),
    "optional properties of an object in a schema": f"{MAX_OPTIONAL:,}",
    "`multipleOf` in a schema, its decimal point left out": (
        f"{MAX_MULTIPLE:,}, or a power of ten"
    ),
    "patterns in one `allOf`": str(MAX_PATTERNS),
    "integers in a schema": (
        f"{MAX_EXACT}, up or down; beyond that those that a 64-bit float holds, from "
        f"{LEAST_INTEGER} to {GREATEST_INTEGER}"
    ),
    "a `minimum` in a schema without a `maximum`, and the other way round": (
        f"less than {MAX_OPEN}, up or down"
    ),
    "parts of tools' schemas that are tried, to find what cannot be enforced": (
        f"{MAX_TRIES}, {size(MAX_TRIED_CHARS)} of JSON"
    ),
    "JSON schemas in a Lark grammar": str(MAX_EMBEDDED),
    **trial_limits(ROUTER_LIMITS),
    "grammars that wait to be compiled": str(queue.MAX_WAITING),
    "time until a grammar is compiled": f"{MAX_TRIAL_S:g} s",
    "`priority`, up or down": str(MAX_PRIORITY),
    "characters of `prompt_cache_key`, `user` and `metadata.user_id`": str(MAX_SESSION_CHARS),
    "bytes of a header that names a session": str(MAX_SESSION_BYTES),
    "sessions that a router remembers": (
        f"{MAX_SESSIONS}, {PlacementConfig().session_ttl_s:g} s (`--session-ttl-s`)"
    ),
    "characters of `x-request-id`": str(longest_request_id()),
}
KEYS = {
    "keys in a file": str(api_keys.MAX_KEYS),
    "size of the file": size(api_keys.MAX_FILE_BYTES),
    "requests per minute of a key": (
        "no limit (`--requests-per-minute` of `pdserve api-keys add`)"
    ),
    "requests at once of a key": "no limit (`--max-concurrent` of `pdserve api-keys add`)",
}
CONTROL = {
    "connections at once": str(control_port.MAX_CONNECTIONS),
    "time of a handshake": f"{control_port.HANDSHAKE_TIMEOUT_MS / 1000:g} s",
    "time without a call": f"{control_port.IDLE_MS / 1000:g} s",
    "time between two pings": f"{control_port.MIN_PING_INTERVAL_MS} ms",
    "calls at once on a connection": str(control_port.MAX_CALLS_PER_CONNECTION),
    "message": size(MAX_MESSAGE_BYTES),
    "metadata of a call": size(control_port.MAX_METADATA_BYTES),
    "characters of an id": str(MAX_ID_LENGTH),
    "time until a stream names its ends": f"{GREETING_TIMEOUT_S:g} s",
    "aborts and messages about pulls that wait for the next turn of the step thread": str(
        inbox.MAX_BESIDE
    ),
    "calls and aborts in a message of a stream": (
        f"{router_calls.MAX_CALLS_PER_MESSAGE} and {router_calls.MAX_ABORTS_PER_MESSAGE}"
    ),
    "calls of a router without a reply": str(router_calls.MAX_WAITING_CALLS),
    "replies and tokens that a router has not read": str(output_streams.MAX_PENDING),
    "blocks in one report to a router": str(block_reports.MAX_REPORTED),
    "blocks of reports that a router keeps": (
        f"{block_index.MAX_BLOCKS:,}, each once, whatever nodes and tiers have it; "
        f"{block_index.MAX_EXPECTED:,} that it expects"
    ),
    **trial_limits(NODE_LIMITS),
    "memory of the compiled grammars that are kept": size(kept.MAX_KEPT_BYTES),
    "grammars that wait to be compiled": str(compiling.MAX_PREPARING),
    "requests that wait on the node": f"{HANDOFF.max_queued_requests} (`--max-queued-requests`)",
}
DISK = {
    "bytes of prefixes in a node's files, in blocks of 4 KiB": "none (`--prefix-disk-size`)",
    "time that files stay in the folder of a node that is gone": (
        f"{block_folder.ABANDONED_NS // (24 * 3600 * 10**9)} days"
    ),
    "nodes of a host that write below one path": str(block_folder.MOST_FOLDERS),
    "blocks of other nodes that a node knows of": f"{block_folder.MOST_BLOCKS_SEEN:,}",
    "host blocks that reads hold at once": "half of those there are",
    "time that a prompt waits for a read": "what computing should take",
    "failures of a disk, in reads or in writes": "1",
}
KV = {
    "time of a handshake": f"{kv.DEFAULT_PEER_TIMEOUT_S:g} s",
    "part of a message": (
        f"{size(kv.Limits().max_frame_bytes * kv.Limits().max_joined // 2)}, or the keys of one "
        "block of a layer when they are more"
    ),
    "header of a frame": size(kv.MAX_HEADER_BYTES),
    "blocks in a frame": str(kv.MAX_BLOCKS_PER_FRAME),
    "senders at once": f"{kv.Limits().max_sessions}, or what the open files allow (`ulimit -n`)",
    "nodes that one node writes to over RDMA at once": str(rdma_lane.MAX_WRITERS),
    "nodes that one node reads from by RDMA at once": str(read_lane.MAX_READERS),
    "connections of a sender": f"`--kv-lanes`, {HANDOFF.kv_lanes} unless it is set",
    "transfers of a sender": str(kv.MAX_TRANSFERS_PER_LINK),
    "unacknowledged bytes of a sender": (
        f"{size(HANDOFF.kv_window)} (`--kv-window`) times `--kv-lanes`; "
        f"with more than {kv.WINDOWS_PER_NODE} that send, "
        f"an equal share of {size(kv.WINDOWS_PER_NODE * HANDOFF.kv_window)} times `--kv-lanes`; "
        "on ipc, shm and rdma twice as much"
    ),
    "slots for frames on their way to a card": (
        f"two windows ({size(kv.RING_RECEIVING_WINDOWS * HANDOFF.kv_window)} by default) for what "
        "comes, six for what is sent"
    ),
    "messages that wait to be read": f"{RECEIVER_HIGH_WATER_MARK} from each sender",
}
STORE = {
    "record that is read": size(MAX_VALUE_BYTES),
    "records of a kind that are read": str(MAX_ENTRIES),
    "nodes of one model that a router uses": str(MAX_NODES),
    "time of a call": f"{CALL_TIMEOUT_S:g} s",
}


def tables() -> list[dict[str, str]]:
    """Every table of the page: its limits by their inputs."""
    found: list[dict[str, str]] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| input |"):
            found.append({})
        elif line.startswith("| "):
            name, limit, beyond = (cell.strip() for cell in line.strip("|").split("|"))
            assert beyond, line
            assert name not in found[-1], line
            found[-1][name] = limit
    return found


def test_the_tables_say_what_the_code_does() -> None:
    wanted: list[Any] = [
        ROUTER, KEYS, CONTROL, DISK, connection_limits(metrics_server.LIMITS), KV, STORE
    ]  # fmt: skip
    assert tables() == wanted


def test_the_paths_that_a_keys_limits_count() -> None:
    _, _, text = PAGE.read_text().partition("Both limits of a key count ")
    counted = text.partition(". ")[0]
    limited = {
        route.path for route, access in declared_routes(make_edge()) if access is Access.LIMITED
    }
    assert set(re.findall("`([^`]+)`", counted)) == limited
