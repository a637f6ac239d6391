from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("protocol_version", "sender_id", "sender_epoch", "receiver_id", "receiver_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    sender_id: str
    sender_epoch: int
    receiver_id: str
    receiver_epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., sender_id: _Optional[str] = ..., sender_epoch: _Optional[int] = ..., receiver_id: _Optional[str] = ..., receiver_epoch: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("num_tokens", "end_token_id", "begin_token_ids")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    end_token_id: int
    begin_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., end_token_id: _Optional[int] = ..., begin_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenRules(_message.Message):
    __slots__ = ("biased_token_ids", "biases", "bad_words", "allowed_token_ids", "thinking")
    BIASED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    biased_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    thinking: ThinkingBudget
    def __init__(self, biased_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., thinking: _Optional[_Union[ThinkingBudget, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logprobs", "stop_token_ids", "ignore_eos", "min_tokens", "grammar", "rules", "prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    grammar: Grammar
    rules: TokenRules
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., rules: _Optional[_Union[TokenRules, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class GenerationRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "sampling", "deadline_ms", "priority", "output_token_ids", "traceparent", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    deadline_ms: int
    priority: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("decode_node_id", "decode_epoch", "kv_endpoint", "lease_token", "generation", "target_block_ids", "num_cached_tokens", "fingerprint", "lease_ms", "kv_description", "may_be_short")
    DECODE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    KV_DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MAY_BE_SHORT_FIELD_NUMBER: _ClassVar[int]
    decode_node_id: str
    decode_epoch: int
    kv_endpoint: str
    lease_token: int
    generation: int
    target_block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_cached_tokens: int
    fingerprint: str
    lease_ms: int
    kv_description: str
    may_be_short: bool
    def __init__(self, decode_node_id: _Optional[str] = ..., decode_epoch: _Optional[int] = ..., kv_endpoint: _Optional[str] = ..., lease_token: _Optional[int] = ..., generation: _Optional[int] = ..., target_block_ids: _Optional[_Iterable[int]] = ..., num_cached_tokens: _Optional[int] = ..., fingerprint: _Optional[str] = ..., lease_ms: _Optional[int] = ..., kv_description: _Optional[str] = ..., may_be_short: _Optional[bool] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request", "must_prefill_locally", "may_wait", "source")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MUST_PREFILL_LOCALLY_FIELD_NUMBER: _ClassVar[int]
    MAY_WAIT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request: GenerationRequest
    must_prefill_locally: bool
    may_wait: bool
    source: PrefixSource
    def __init__(self, request: _Optional[_Union[GenerationRequest, _Mapping]] = ..., must_prefill_locally: _Optional[bool] = ..., may_wait: _Optional[bool] = ..., source: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms", "free_blocks", "free_seats")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_SEATS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retry_after_ms: int
    free_blocks: int
    free_seats: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., free_blocks: _Optional[int] = ..., free_seats: _Optional[int] = ...) -> None: ...

class LocalStart(_message.Message):
    __slots__ = ("num_cached_tokens",)
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("node_id", "epoch", "num_tokens", "num_disk_tokens", "num_queued_tokens")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    num_tokens: int
    num_disk_tokens: int
    num_queued_tokens: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_disk_tokens: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "ticket", "source")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request: GenerationRequest
    ticket: Ticket
    source: PrefixSource
    def __init__(self, request: _Optional[_Union[GenerationRequest, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., source: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "reserve", "prefill")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    id: int
    reserve: ReserveRequest
    prefill: PrefillRequest
    def __init__(self, id: _Optional[int] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ...) -> None: ...

class Attempts(_message.Message):
    __slots__ = ("request_ids", "attempts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("request_id", "attempt", "ticket", "source_id", "source_epoch", "block_hashes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    ticket: Ticket
    source_id: str
    source_epoch: int
    block_hashes: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., source_id: _Optional[str] = ..., source_epoch: _Optional[int] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class RefusedPull(_message.Message):
    __slots__ = ("node_id", "epoch", "lease_token")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    lease_token: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_token: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("source_id", "source_epoch", "block_hashes")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    source_epoch: int
    block_hashes: bytes
    def __init__(self, source_id: _Optional[str] = ..., source_epoch: _Optional[int] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class NewNode(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("envelope", "calls", "aborts", "echo", "pulls", "resend_blocks", "fetches", "refused_pulls", "new_nodes", "beat_ms")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    RESEND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PULLS_FIELD_NUMBER: _ClassVar[int]
    NEW_NODES_FIELD_NUMBER: _ClassVar[int]
    BEAT_MS_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    aborts: Attempts
    echo: int
    pulls: _containers.RepeatedCompositeFieldContainer[Pull]
    resend_blocks: bool
    fetches: _containers.RepeatedCompositeFieldContainer[Fetch]
    refused_pulls: _containers.RepeatedScalarFieldContainer[int]
    new_nodes: _containers.RepeatedCompositeFieldContainer[NewNode]
    beat_ms: int
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., aborts: _Optional[_Union[Attempts, _Mapping]] = ..., echo: _Optional[int] = ..., pulls: _Optional[_Iterable[_Union[Pull, _Mapping]]] = ..., resend_blocks: _Optional[bool] = ..., fetches: _Optional[_Iterable[_Union[Fetch, _Mapping]]] = ..., refused_pulls: _Optional[_Iterable[int]] = ..., new_nodes: _Optional[_Iterable[_Union[NewNode, _Mapping]]] = ..., beat_ms: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reply(_message.Message):
    __slots__ = ("call_id", "ticket", "local", "accepted", "refusal")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    ticket: Ticket
    local: LocalStart
    accepted: Accepted
    refusal: Refusal
    def __init__(self, call_id: _Optional[int] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., local: _Optional[_Union[LocalStart, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("num_top", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_top: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_top: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class OutputDetails(_message.Message):
    __slots__ = ("place", "logprobs", "finish_reason", "error_code", "error_message", "queue_us", "compute_us", "prompt_logprobs")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    place: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    error_code: str
    error_message: str
    queue_us: int
    compute_us: int
    prompt_logprobs: PromptLogprobs
    def __init__(self, place: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class OutputBatch(_message.Message):
    __slots__ = ("request_ids", "attempts", "first_indexes", "num_tokens", "token_ids", "is_started", "num_cached_tokens", "num_drafted", "num_accepted", "details")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEXES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_STARTED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    first_indexes: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_started: _containers.RepeatedScalarFieldContainer[bool]
    num_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_drafted: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[OutputDetails]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., first_indexes: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., is_started: _Optional[_Iterable[bool]] = ..., num_cached_tokens: _Optional[_Iterable[int]] = ..., num_drafted: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[OutputDetails, _Mapping]]] = ...) -> None: ...

class BlockReport(_message.Message):
    __slots__ = ("number", "added", "removed", "tier")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    number: int
    added: bytes
    removed: bytes
    tier: int
    def __init__(self, number: _Optional[int] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., tier: _Optional[int] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("replies", "outputs", "stuck_ms", "echo", "blocks", "pulls", "offered_hashes", "refused_pulls", "warm_from", "offered_to")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STUCK_MS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    OFFERED_HASHES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PULLS_FIELD_NUMBER: _ClassVar[int]
    WARM_FROM_FIELD_NUMBER: _ClassVar[int]
    OFFERED_TO_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    outputs: OutputBatch
    stuck_ms: int
    echo: int
    blocks: BlockReport
    pulls: _containers.RepeatedCompositeFieldContainer[Pull]
    offered_hashes: bytes
    refused_pulls: _containers.RepeatedCompositeFieldContainer[RefusedPull]
    warm_from: str
    offered_to: NewNode
    def __init__(self, replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ..., outputs: _Optional[_Union[OutputBatch, _Mapping]] = ..., stuck_ms: _Optional[int] = ..., echo: _Optional[int] = ..., blocks: _Optional[_Union[BlockReport, _Mapping]] = ..., pulls: _Optional[_Iterable[_Union[Pull, _Mapping]]] = ..., offered_hashes: _Optional[bytes] = ..., refused_pulls: _Optional[_Iterable[_Union[RefusedPull, _Mapping]]] = ..., warm_from: _Optional[str] = ..., offered_to: _Optional[_Union[NewNode, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class RoleRequest(_message.Message):
    __slots__ = ("envelope", "role", "number", "others")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    role: str
    number: int
    others: NodeNames
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., role: _Optional[str] = ..., number: _Optional[int] = ..., others: _Optional[_Union[NodeNames, _Mapping]] = ...) -> None: ...

class NodeNames(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RoleReply(_message.Message):
    __slots__ = ("earlier", "refusal")
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    earlier: str
    refusal: Refusal
    def __init__(self, earlier: _Optional[str] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...
