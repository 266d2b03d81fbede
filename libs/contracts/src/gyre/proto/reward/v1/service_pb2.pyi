from gyre.proto.common.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RegradeRequest(_message.Message):
    __slots__ = ("task", "snapshot_path", "snapshot_digest", "snapshot_size")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_PATH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SIZE_FIELD_NUMBER: _ClassVar[int]
    task: str
    snapshot_path: str
    snapshot_digest: str
    snapshot_size: int
    def __init__(self, task: _Optional[str] = ..., snapshot_path: _Optional[str] = ..., snapshot_digest: _Optional[str] = ..., snapshot_size: _Optional[int] = ...) -> None: ...

class RegradeResponse(_message.Message):
    __slots__ = ("reward", "num_passed", "num_checks", "placeholder", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSED_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKS_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    reward: float
    num_passed: int
    num_checks: int
    placeholder: bool
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, reward: _Optional[float] = ..., num_passed: _Optional[int] = ..., num_checks: _Optional[int] = ..., placeholder: _Optional[bool] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...
