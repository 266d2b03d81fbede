"""Reading JSON of strangers: typed, without an object per token, and with errors that name file, step and field."""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
from gyre.contracts.errors import ConfigError, GyreError

MAX_LOGPROB = 1e-3  # rounding may lift a log-prob of a certain token a little above 0
ABSENT = msgspec.Raw(b"null")
_IDS = re.compile(rb"\[[0-9,\s]*\]")
_NUMBERS = re.compile(rb"\[[0-9eE+\-.,\s]*\]")
T = TypeVar("T")


class TraceError(GyreError):
    """A trace cannot be read. The message names the file, the step and the field."""


class UnknownFormat(ConfigError):
    """Nothing here can read the file."""


def decode(data: bytes, type_: type[T], where: str) -> T:
    """JSON into `type_` (fields it does not declare are skipped). Raises TraceError."""
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {str(error).replace('$.', '')}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: {_constant(data) or error}") from error


def ids(raw: msgspec.Raw, where: str) -> np.ndarray:
    """A JSON array of token ids as int32 [T]. Raises TraceError."""
    text = bytes(raw)
    if not _IDS.fullmatch(text) or text.count(b"[") > 1:
        raise TraceError(f"{where}: {_shown(text)}; expected a list of integers from 0 to 2147483647")
    values = np.fromstring(text[1:-1], np.int64, sep=",") if text[1:-1].strip() else np.empty(0, np.int64)
    if len(values) and values.max() > np.iinfo(np.int32).max:
        raise TraceError(f"{where}: id {values.max()}; at most 2147483647")
    return values.astype(np.int32)


def logprobs(raw: msgspec.Raw, num: int, where: str) -> np.ndarray:
    """A JSON array of the log-probs of `num` sampled tokens as float32 [num]. Raises TraceError."""
    text = bytes(raw)
    if not _NUMBERS.fullmatch(text) or text.count(b"[") > 1:
        raise TraceError(f"{where}: {_shown(text)}; expected a list of {num} numbers")
    values = np.fromstring(text[1:-1], np.float64, sep=",") if text[1:-1].strip() else np.empty(0, np.float64)
    if len(values) != num:
        raise TraceError(f"{where}: {len(values)} log-probs of {num} output tokens")
    bad = np.flatnonzero(~(np.isfinite(values) & (values <= MAX_LOGPROB)))
    if len(bad):
        raise TraceError(f"{where}[{bad[0]}]: {values[bad[0]]}; a log-prob is finite and at most 0")
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    if not np.isfinite(found).all():
        raise TraceError(f"{where}: a log-prob does not fit into 32 bits")
    return found


def dumped(value: Any, where: str) -> str:
    """`value` as JSON text, always the same for the same value. Raises TraceError."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise TraceError(f"{where}: nested too deeply") from error


def _shown(text: bytes) -> str:
    shown = text[:40].decode("utf-8", "replace")
    return "it is not there" if text == b"null" else shown + ("..." if len(text) > 40 else "")


def _constant(data: bytes) -> str:
    """Where a NaN or an infinity stands in what would be JSON without it, or ""."""
    if not re.search(rb"NaN|Infinity", data):
        return ""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    return next((f"{path} is {number}; not a number that JSON has" for path, number in _floats(value) if number != number
                 or number in (float("inf"), float("-inf"))), "")


def _floats(value: Any) -> Iterator[tuple[str, float]]:
    """Every float with its path."""
    stack = [("", value)]
    while stack:
        path, one = stack.pop()
        if isinstance(one, float):
            yield path, one
        elif isinstance(one, dict):
            stack.extend((f"{path}.{key}".lstrip("."), v) for key, v in reversed(one.items()))
        elif isinstance(one, list):
            stack.extend((f"{path}[{n}]", v) for n, v in reversed(list(enumerate(one))))
