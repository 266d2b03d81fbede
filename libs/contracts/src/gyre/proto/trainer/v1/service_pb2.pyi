from gyre.proto.common.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("cell", "epoch", "worker", "transfer")
    CELL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    cell: int
    epoch: int
    worker: str
    transfer: str
    def __init__(self, cell: _Optional[int] = ..., epoch: _Optional[int] = ..., worker: _Optional[str] = ..., transfer: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("step", "attempt", "version", "checksum", "transfer", "accepted", "reason", "retry_after_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    version: int
    checksum: str
    transfer: str
    accepted: bool
    reason: str
    retry_after_s: float
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., version: _Optional[int] = ..., checksum: _Optional[str] = ..., transfer: _Optional[str] = ..., accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("cell", "worker")
    CELL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    cell: int
    worker: str
    def __init__(self, cell: _Optional[int] = ..., worker: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("worker", "step", "attempt", "max_micro_steps")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    step: int
    attempt: int
    max_micro_steps: int
    def __init__(self, worker: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., max_micro_steps: _Optional[int] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("micro_step", "digest", "blob_path", "blob_size")
    MICRO_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOB_PATH_FIELD_NUMBER: _ClassVar[int]
    BLOB_SIZE_FIELD_NUMBER: _ClassVar[int]
    micro_step: str
    digest: str
    blob_path: str
    blob_size: int
    def __init__(self, micro_step: _Optional[str] = ..., digest: _Optional[str] = ..., blob_path: _Optional[str] = ..., blob_size: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "step", "attempt")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    step: int
    attempt: int
    def __init__(self, worker: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("verdict", "micro_step", "digest", "blob_path", "blob_size", "lease_s", "retry_after_s", "more")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[ClaimResponse.Verdict]
        VERDICT_WORK: _ClassVar[ClaimResponse.Verdict]
        VERDICT_WAIT: _ClassVar[ClaimResponse.Verdict]
        VERDICT_REDUCE: _ClassVar[ClaimResponse.Verdict]
        VERDICT_STALE: _ClassVar[ClaimResponse.Verdict]
        VERDICT_LEAVE: _ClassVar[ClaimResponse.Verdict]
    VERDICT_UNSPECIFIED: ClaimResponse.Verdict
    VERDICT_WORK: ClaimResponse.Verdict
    VERDICT_WAIT: ClaimResponse.Verdict
    VERDICT_REDUCE: ClaimResponse.Verdict
    VERDICT_STALE: ClaimResponse.Verdict
    VERDICT_LEAVE: ClaimResponse.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOB_PATH_FIELD_NUMBER: _ClassVar[int]
    BLOB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    verdict: ClaimResponse.Verdict
    micro_step: str
    digest: str
    blob_path: str
    blob_size: int
    lease_s: float
    retry_after_s: float
    more: _containers.RepeatedCompositeFieldContainer[Work]
    def __init__(self, verdict: _Optional[_Union[ClaimResponse.Verdict, str]] = ..., micro_step: _Optional[str] = ..., digest: _Optional[str] = ..., blob_path: _Optional[str] = ..., blob_size: _Optional[int] = ..., lease_s: _Optional[float] = ..., retry_after_s: _Optional[float] = ..., more: _Optional[_Iterable[_Union[Work, _Mapping]]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("worker", "step", "attempt", "micro_step", "seconds", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    step: int
    attempt: int
    micro_step: str
    seconds: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, worker: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., micro_step: _Optional[str] = ..., seconds: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("worker", "step", "attempt", "micro_steps", "checksum", "transfer", "generation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    step: int
    attempt: int
    micro_steps: _containers.RepeatedScalarFieldContainer[str]
    checksum: str
    transfer: str
    generation: int
    def __init__(self, worker: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., micro_steps: _Optional[_Iterable[str]] = ..., checksum: _Optional[str] = ..., transfer: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...
