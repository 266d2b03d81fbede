"""A small, strict reader of POSIX tar archives that were written by code nobody trusts.

`tarfile` is not used: its filters and its header parser have had holes that depend on the patch release of Python.
This reader knows ustar, the long names of GNU tar and of pax, works on bytes that are in memory already, bounds
everything it reads, and yields what it saw; it never touches a file system.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

BLOCK = 512
MAX_EXTENSION_BYTES = 64 * 1024
_WITHOUT_DATA = {b"1", b"2", b"3", b"4", b"5", b"6"}  # nothing follows their header, whatever their size field says
Kind = Literal["file", "directory", "symlink", "other"]
_KINDS: dict[bytes, Kind] = {b"0": "file", b"\0": "file", b"7": "file", b"5": "directory", b"2": "symlink"}
_OTHER = {b"1": "a hard link", b"3": "a character device", b"4": "a block device", b"6": "a FIFO",
          b"S": "a sparse file"}


class MalformedTar(ValueError):
    """The bytes are not a tar archive from here on; nothing behind this point can be trusted."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. `what` says in words what an entry of kind `other` is; `link` is a symlink's target."""

    path: str
    kind: Kind
    what: str
    link: str
    executable: bool
    data: memoryview


@dataclass(slots=True)
class _Extensions:
    """What extension headers said about the next member."""

    path: str | None = None
    link: str | None = None
    size: int | None = None
    sparse: bool = False


def read_members(archive: bytes) -> Iterator[Member]:
    """The members of `archive` in order.

    Raises:
        MalformedTar: a header or a length cannot be right; members before it were yielded.
    """
    view, offset, extensions = memoryview(archive), 0, _Extensions()
    while offset + BLOCK <= len(view):
        header = bytes(view[offset:offset + BLOCK])
        if not any(header):
            return
        _check_sum(header, offset)
        flag = header[156:157]
        size = _number(header[124:136], "size", offset)
        if flag not in b"xgLK" and extensions.size is not None:
            size = extensions.size
        if flag in _WITHOUT_DATA:
            size = 0
        start, end = offset + BLOCK, offset + BLOCK + size
        if end > len(view):
            raise MalformedTar(f"at byte {offset}: a member of {size} bytes reaches past the end")
        if flag in b"xgLK":
            _extend(extensions, flag, view[start:end], offset)
        else:
            yield _member(header, flag, extensions, view[start:end] if flag in (b"0", b"\0", b"7") else view[:0])
            extensions = _Extensions()
        offset = end + -size % BLOCK
    if offset != len(view) or extensions != _Extensions():
        raise MalformedTar(f"at byte {min(offset, len(view))}: it is cut off")


def _check_sum(header: bytes, offset: int) -> None:
    stated = _number(header[148:156], "checksum", offset)
    if sum(header[:148]) + sum(header[156:]) + 8 * 32 != stated:
        raise MalformedTar(f"at byte {offset}: the header's checksum does not match")


def _number(field: bytes, name: str, offset: int) -> int:
    """An octal field; or base 256 when its first bit is set, which may not be negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.rstrip(b" \0").lstrip(b" ")
    if any(c not in b"01234567" for c in text):
        raise MalformedTar(f"at byte {offset}: {name} {field!r} is not an octal number")
    return int(text or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _member(header: bytes, flag: bytes, extensions: _Extensions, data: memoryview) -> Member:
    path = _text(header[:100])
    if header[257:262] == b"ustar" and (prefix := _text(header[345:500])):
        path = f"{prefix}/{path}"
    kind: Kind = "other" if extensions.sparse else _KINDS.get(flag, "other")
    what = "a sparse file" if extensions.sparse else _OTHER.get(flag, f"of type {flag!r}")
    link = extensions.link if extensions.link is not None else _text(header[157:257])
    executable = bool(_number(header[100:108], "mode", 0) & 0o111)
    return Member(extensions.path if extensions.path is not None else path, kind, what, link, executable, data)


def _extend(extensions: _Extensions, flag: bytes, data: memoryview, offset: int) -> None:
    if len(data) > MAX_EXTENSION_BYTES:
        raise MalformedTar(f"at byte {offset}: an extension header of {len(data)} bytes")
    body = bytes(data)
    if flag == b"L":
        extensions.path = _text(body)
    elif flag == b"K":
        extensions.link = _text(body)
    elif flag == b"x":
        _read_pax(extensions, body, offset)
    # A global header ("g") sets defaults for everything behind it; none of them is needed, so none is believed.


def _read_pax(extensions: _Extensions, body: bytes, offset: int) -> None:
    """Records `<length> <key>=<value>\\n`, where length counts the whole record."""
    position = 0
    while position < len(body):
        space = body.find(b" ", position, position + 8)
        digits = body[position:space] if space > 0 else b""
        end = position + int(digits) if digits.isdigit() else 0
        record = body[space + 1:end]
        if not digits.isdigit() or end > len(body) or not record.endswith(b"\n") or b"=" not in record:
            raise MalformedTar(f"at byte {offset}: a broken pax record")
        key, _, value = record[:-1].partition(b"=")
        _apply_pax(extensions, key, value, offset)
        position = end


def _apply_pax(extensions: _Extensions, key: bytes, value: bytes, offset: int) -> None:
    if key == b"path":
        extensions.path = value.decode("utf-8", "surrogateescape")
    elif key == b"linkpath":
        extensions.link = value.decode("utf-8", "surrogateescape")
    elif key == b"size":
        if not value.isdigit() or len(value) > 15:
            raise MalformedTar(f"at byte {offset}: pax size {value[:20]!r}")
        extensions.size = int(value)
    elif key.startswith(b"GNU.sparse."):
        extensions.sparse = True
