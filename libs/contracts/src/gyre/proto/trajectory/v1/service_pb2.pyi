from gyre.proto.common.v1 import status_pb2 as _status_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class InspectTreeRequest(_message.Message):
    __slots__ = ("execution",)
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    execution: str
    def __init__(self, execution: _Optional[str] = ...) -> None: ...

class InspectTreeResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class InspectGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class InspectGroupResponse(_message.Message):
    __slots__ = ("group", "completed", "num_executions", "num_settled", "detail")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SETTLED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    group: str
    completed: bool
    num_executions: int
    num_settled: int
    detail: str
    def __init__(self, group: _Optional[str] = ..., completed: _Optional[bool] = ..., num_executions: _Optional[int] = ..., num_settled: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...
