from gyre.proto.common.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed", "namespace", "num_emitted", "ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: bytes
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    namespace: str
    num_emitted: int
    ticket: bytes
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., namespace: _Optional[str] = ..., num_emitted: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("index", "token_ids", "logprobs", "behaviour_logprobs", "versions", "finish", "detail", "kv_versions", "num_reused")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    KV_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_REUSED_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: bytes
    logprobs: bytes
    behaviour_logprobs: bytes
    versions: _containers.RepeatedScalarFieldContainer[int]
    finish: str
    detail: str
    kv_versions: _containers.RepeatedScalarFieldContainer[int]
    num_reused: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[int]] = ..., finish: _Optional[str] = ..., detail: _Optional[str] = ..., kv_versions: _Optional[_Iterable[int]] = ..., num_reused: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class SetAdmissionRequest(_message.Message):
    __slots__ = ("open",)
    OPEN_FIELD_NUMBER: _ClassVar[int]
    open: bool
    def __init__(self, open: _Optional[bool] = ...) -> None: ...

class SetAdmissionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightsRef(_message.Message):
    __slots__ = ("version", "checksum", "transfer", "checkpoint")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    version: int
    checksum: str
    transfer: str
    checkpoint: str
    def __init__(self, version: _Optional[int] = ..., checksum: _Optional[str] = ..., transfer: _Optional[str] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: WeightsRef
    def __init__(self, weights: _Optional[_Union[WeightsRef, _Mapping]] = ...) -> None: ...

class LoadWeightsResponse(_message.Message):
    __slots__ = ("version", "checksum")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    version: int
    checksum: str
    def __init__(self, version: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("epoch", "weights")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    weights: WeightsRef
    def __init__(self, epoch: _Optional[int] = ..., weights: _Optional[_Union[WeightsRef, _Mapping]] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("version", "checksum")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    version: int
    checksum: str
    def __init__(self, version: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("version", "checksum", "ok", "detail")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    version: int
    checksum: str
    ok: bool
    detail: str
    def __init__(self, version: _Optional[int] = ..., checksum: _Optional[str] = ..., ok: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_tokens_free", "kv_tokens_total", "version", "asleep", "admitting", "num_tokens_sampled", "num_tokens_prefilled", "num_tokens_reused", "migration", "layout", "num_preempted", "num_held")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    ADMITTING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_PREFILLED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_REUSED_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_tokens_free: int
    kv_tokens_total: int
    version: int
    asleep: bool
    admitting: bool
    num_tokens_sampled: int
    num_tokens_prefilled: int
    num_tokens_reused: int
    migration: str
    layout: str
    num_preempted: int
    num_held: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_tokens_free: _Optional[int] = ..., kv_tokens_total: _Optional[int] = ..., version: _Optional[int] = ..., asleep: _Optional[bool] = ..., admitting: _Optional[bool] = ..., num_tokens_sampled: _Optional[int] = ..., num_tokens_prefilled: _Optional[int] = ..., num_tokens_reused: _Optional[int] = ..., migration: _Optional[str] = ..., layout: _Optional[str] = ..., num_preempted: _Optional[int] = ..., num_held: _Optional[int] = ...) -> None: ...

class OpenExportRequest(_message.Message):
    __slots__ = ("ticket", "epoch", "request_id", "namespace", "lease_s")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    epoch: int
    request_id: str
    namespace: str
    lease_s: float
    def __init__(self, ticket: _Optional[str] = ..., epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., namespace: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("layout", "weights_version", "namespace", "num_tokens", "max_tokens", "region", "block_bytes")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    layout: str
    weights_version: int
    namespace: str
    num_tokens: int
    max_tokens: int
    region: str
    block_bytes: int
    def __init__(self, layout: _Optional[str] = ..., weights_version: _Optional[int] = ..., namespace: _Optional[str] = ..., num_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., region: _Optional[str] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class ReadStageRequest(_message.Message):
    __slots__ = ("ticket", "first_block")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    first_block: int
    def __init__(self, ticket: _Optional[str] = ..., first_block: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("first_block", "rows", "checksums", "token_ids", "kv_versions")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[bytes]
    token_ids: bytes
    kv_versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_block: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[bytes]] = ..., token_ids: _Optional[bytes] = ..., kv_versions: _Optional[_Iterable[int]] = ...) -> None: ...

class FreezeRequest(_message.Message):
    __slots__ = ("ticket", "first_block", "request_id", "epoch", "namespace")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    first_block: int
    request_id: str
    epoch: int
    namespace: str
    def __init__(self, ticket: _Optional[str] = ..., first_block: _Optional[int] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class Frozen(_message.Message):
    __slots__ = ("tail", "num_known", "num_computed", "known_ids", "digest", "opaque")
    TAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    tail: Stage
    num_known: int
    num_computed: int
    known_ids: bytes
    digest: bytes
    opaque: bytes
    def __init__(self, tail: _Optional[_Union[Stage, _Mapping]] = ..., num_known: _Optional[int] = ..., num_computed: _Optional[int] = ..., known_ids: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., opaque: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("ticket", "epoch", "layout", "weights_version", "namespace", "num_tokens", "lease_s")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    epoch: int
    layout: str
    weights_version: int
    namespace: str
    num_tokens: int
    lease_s: float
    def __init__(self, ticket: _Optional[str] = ..., epoch: _Optional[int] = ..., layout: _Optional[str] = ..., weights_version: _Optional[int] = ..., namespace: _Optional[str] = ..., num_tokens: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("ticket", "region", "stage", "timeout_s")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    region: str
    stage: Stage
    timeout_s: float
    def __init__(self, ticket: _Optional[str] = ..., region: _Optional[str] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("ticket", "frozen")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    frozen: Frozen
    def __init__(self, ticket: _Optional[str] = ..., frozen: _Optional[_Union[Frozen, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseTicketRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class ReleaseTicketResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...
