"""Facts <-> bytes: a MessagePack map as envelope, validated into the typed record.

NumPy arrays travel as {"d": dtype, "s": shape, "b": bytes}. Unknown fields are ignored, so that a reader of release
N-1 understands release N. A body that would not fit a message is put into the blob store and `ref` stands for it.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np
from gyre.contracts.errors import BrokenBody, InvalidId, MessageTooLarge, UnknownType
from gyre.contracts.events import BlobRef, Fact, GroupDispatched
from gyre.contracts.ids import check_id
from gyre.contracts.subjects import BY_TYPE, row_of

VERSION = 1
MAX_MESSAGE_BYTES = 512 * 1024
HEADER_ALLOWANCE_BYTES = 4 * 1024
_DTYPES = {"<i4", "<f4", "<i8", "<f8", "|u1", "|b1", "<u4"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What travels around a fact. `time` is Unix nanoseconds; `key` makes the fact unique in its run."""

    v: int
    type: str
    id: str
    run: str
    source: str
    time: int
    key: str
    epoch: int = 0
    trace: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    ref: BlobRef | None = None


def _encode_hook(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
        return {"d": dtype.str, "s": list(array.shape), "b": array.astype(dtype, copy=False).tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_array(value: object) -> np.ndarray:
    if not isinstance(value, dict) or value.get("d") not in _DTYPES:
        raise ValueError("expected an array {d, s, b} of a known dtype")
    dtype, shape, data = np.dtype(value["d"]), value["s"], value["b"]
    if len(data) != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"array of shape {shape} and {dtype} cannot have {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _decode_hook(type_: type, value: object) -> object:
    if type_ is np.ndarray:
        return _decode_array(value)
    raise NotImplementedError(f"cannot decode {type_}")


def to_plain(record: object) -> Any:
    """A record as maps, lists, strings, numbers and bytes."""
    return msgspec.to_builtins(record, enc_hook=_encode_hook, builtin_types=(bytes,))


def from_plain(value: object, type_: type[T]) -> T:
    """Validate plain values into `type_`, ignoring unknown fields.

    Raises:
        BrokenBody: says which field is wrong and why.
    """
    try:
        return msgspec.convert(value, type_, strict=True, dec_hook=_decode_hook)
    except (msgspec.ValidationError, ValueError, TypeError, KeyError) as error:
        raise BrokenBody(f"{getattr(type_, '__name__', type_)}: {error}") from error


def pack(record: object) -> bytes:
    """Any record (a fact, a snapshot, a micro-step) as MessagePack."""
    return msgpack.packb(to_plain(record), use_bin_type=True)


def unpack(data: bytes, type_: type[T]) -> T:
    """The inverse of `pack`. Raises BrokenBody."""
    return from_plain(_load(data), type_)


def _load(data: bytes) -> object:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise BrokenBody(f"not MessagePack: {error}") from error


def body_of(fact: Fact) -> bytes:
    """The `data` part alone, as it would go to the blob store."""
    return pack(fact)


def encode(fact: Fact, *, id: str, run: str, source: str, time_ns: int, epoch: int = 0,
           trace: dict[str, str] | None = None, ref: BlobRef | None = None) -> bytes:
    """The envelope of `fact` as bytes; with `ref` the body is left out, as it lies in the blob store.

    Raises:
        MessageTooLarge: with headers it would pass 512 KiB; store `body_of(fact)` and pass its reference.
    """
    row = row_of(fact)
    envelope = {"v": VERSION, "type": row.type, "id": id, "run": run, "source": source, "time": time_ns,
                "key": row.key(fact), "epoch": epoch, "trace": trace or {}}
    envelope |= {"ref": to_plain(ref)} if ref else {"data": to_plain(fact)}
    message = msgpack.packb(envelope, use_bin_type=True)
    if len(message) > MAX_MESSAGE_BYTES - HEADER_ALLOWANCE_BYTES:
        raise MessageTooLarge(f"{row.type} {row.key(fact)}: {len(message)} bytes, at most "
                              f"{MAX_MESSAGE_BYTES - HEADER_ALLOWANCE_BYTES}")
    return message


def decode_envelope(message: bytes) -> Envelope:
    """The envelope alone. Raises BrokenBody, or UnknownType for another major version."""
    envelope = from_plain(_load(message), Envelope)
    if envelope.v != VERSION:
        raise UnknownType(f"envelope version {envelope.v}, this release reads {VERSION}")
    return envelope


def fact_of(envelope: Envelope, body: bytes | None = None) -> Fact:
    """The typed fact of an envelope; `body` is what its `ref` points to, if it has one.

    Raises:
        UnknownType: this release does not know the type.
        BrokenBody: the data does not fit the record, or its group or execution cannot be a subject token and file name.
    """
    row = BY_TYPE.get(envelope.type)
    if row is None:
        raise UnknownType(f"{envelope.type!r} is not in the table of this release")
    if envelope.ref is not None:
        if body is None:
            raise BrokenBody(f"{envelope.type}: its body lies at {envelope.ref.path} and was not loaded")
        return _named(unpack(body, row.record))
    return _named(from_plain(envelope.data, row.record))


def _named(fact: Fact) -> Fact:
    """`fact`, if the names in it are names. Whoever reads it makes paths and subjects of them."""
    names = [(field, getattr(fact, field)) for field in ("group", "execution") if hasattr(fact, field)]
    if isinstance(fact, GroupDispatched):
        names += [("executions", spec.execution) for spec in fact.executions]
    try:
        for name, value in names:
            check_id(value, f"{type(fact).__name__}.{name}")
    except InvalidId as error:
        raise BrokenBody(str(error)) from None
    return fact


def decode(message: bytes) -> tuple[Envelope, Fact]:
    """Envelope and fact of a message that carries its body itself. Raises ContractError."""
    envelope = decode_envelope(message)
    return envelope, fact_of(envelope)
