from gyre.proto.common.v1 import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartRunRequest(_message.Message):
    __slots__ = ("config_digest",)
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    config_digest: str
    def __init__(self, config_digest: _Optional[str] = ...) -> None: ...

class StartRunResponse(_message.Message):
    __slots__ = ("already_open", "opening")
    ALREADY_OPEN_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    already_open: bool
    opening: int
    def __init__(self, already_open: _Optional[bool] = ..., opening: _Optional[int] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StopRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectRunResponse(_message.Message):
    __slots__ = ("phase", "burst", "steps_finished", "weights_version", "waterlevel", "num_dispatched", "num_terminated", "cells", "close_reason")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BURST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WATERLEVEL_FIELD_NUMBER: _ClassVar[int]
    NUM_DISPATCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_TERMINATED_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REASON_FIELD_NUMBER: _ClassVar[int]
    phase: str
    burst: int
    steps_finished: int
    weights_version: int
    waterlevel: int
    num_dispatched: int
    num_terminated: int
    cells: _containers.RepeatedCompositeFieldContainer[CellRole]
    close_reason: str
    def __init__(self, phase: _Optional[str] = ..., burst: _Optional[int] = ..., steps_finished: _Optional[int] = ..., weights_version: _Optional[int] = ..., waterlevel: _Optional[int] = ..., num_dispatched: _Optional[int] = ..., num_terminated: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[CellRole, _Mapping]]] = ..., close_reason: _Optional[str] = ...) -> None: ...

class CellRole(_message.Message):
    __slots__ = ("cell", "role", "epoch", "stage")
    CELL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    cell: int
    role: str
    epoch: int
    stage: str
    def __init__(self, cell: _Optional[int] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[str] = ...) -> None: ...
