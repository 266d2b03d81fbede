from gyre.proto.common.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListExecutionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExecutionsResponse(_message.Message):
    __slots__ = ("executions",)
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    executions: _containers.RepeatedCompositeFieldContainer[Execution]
    def __init__(self, executions: _Optional[_Iterable[_Union[Execution, _Mapping]]] = ...) -> None: ...

class Execution(_message.Message):
    __slots__ = ("execution", "group", "state", "num_calls", "age_s", "pid")
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    execution: str
    group: str
    state: str
    num_calls: int
    age_s: float
    pid: int
    def __init__(self, execution: _Optional[str] = ..., group: _Optional[str] = ..., state: _Optional[str] = ..., num_calls: _Optional[int] = ..., age_s: _Optional[float] = ..., pid: _Optional[int] = ...) -> None: ...
