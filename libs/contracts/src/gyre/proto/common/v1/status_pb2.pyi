from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Status(_message.Message):
    __slots__ = ("process", "service", "run", "pid", "uptime_s", "cell", "role", "epoch", "weights_version", "gauges", "detail")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    process: str
    service: str
    run: str
    pid: int
    uptime_s: float
    cell: int
    role: str
    epoch: int
    weights_version: int
    gauges: _containers.ScalarMap[str, float]
    detail: str
    def __init__(self, process: _Optional[str] = ..., service: _Optional[str] = ..., run: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., cell: _Optional[int] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., weights_version: _Optional[int] = ..., gauges: _Optional[_Mapping[str, float]] = ..., detail: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
