"""The blob store: a directory or any fsspec URL. Content is immutable and verified on reading."""

import os
import uuid
from pathlib import Path
from typing import Protocol

from gyre.contracts.digest import bytes_digest
from gyre.contracts.errors import BrokenBody, ConfigError
from gyre.contracts.events import BlobRef


class BlobStore(Protocol):
    """Immutable bytes by path."""

    def put(self, path: str, data: bytes) -> BlobRef: ...

    def get(self, ref: BlobRef) -> bytes:
        """Raises BrokenBody if the bytes are missing or not those of the reference."""
        ...

    def read(self, path: str) -> bytes:
        """Unverified bytes. Raises FileNotFoundError."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the blobs that lie right in `folder`, in no order; for people who look around, never for a service."""
        ...


def ref_of(path: str, data: bytes) -> BlobRef:
    """The reference `data` has once it is put at `path`."""
    if path.startswith("/") or ".." in path.split("/"):
        raise ConfigError(f"blob path {path!r}: must be relative and stay inside the store")
    return BlobRef(path, bytes_digest(data), len(data))


def _verified(ref: BlobRef, data: bytes) -> bytes:
    if len(data) != ref.size or bytes_digest(data) != ref.digest:
        raise BrokenBody(f"blob {ref.path}: {len(data)} bytes do not match its reference of {ref.size} bytes")
    return data


class DirectoryBlobs:
    """Blobs as files; a put is atomic (write aside, rename).

    With durability `power` a blob is on the disk when `put` returns: a fact that names it may be committed next.
    """

    def __init__(self, root: Path, durability: str = "process") -> None:
        self.root = root
        self._syncs = durability == "power"

    def put(self, path: str, data: bytes) -> BlobRef:
        ref = ref_of(path, data)
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        with aside.open("wb") as file:
            file.write(data)
            if self._syncs:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(target)
        if self._syncs:
            _sync_folder(target.parent)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        try:
            return _verified(ref, self.read(ref.path))
        except FileNotFoundError:
            raise BrokenBody(f"blob {ref.path}: missing") from None

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def names(self, folder: str) -> list[str]:
        found = (self.root / folder).glob("*")
        return [path.name for path in found if not path.name.startswith(".")]


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FsspecBlobs:
    """Blobs on any filesystem fsspec knows, e.g. `s3://bucket/prefix`."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._fs, self._root = url_to_fs(url)

    def put(self, path: str, data: bytes) -> BlobRef:
        ref = ref_of(path, data)
        target = f"{self._root}/{path}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(target, data)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        try:
            return _verified(ref, self.read(ref.path))
        except FileNotFoundError:
            raise BrokenBody(f"blob {ref.path}: missing") from None

    def read(self, path: str) -> bytes:
        return self._fs.cat_file(f"{self._root}/{path}")

    def names(self, folder: str) -> list[str]:
        try:
            return [str(name).rpartition("/")[2] for name in self._fs.ls(f"{self._root}/{folder}", detail=False)]
        except FileNotFoundError:
            return []


def open_blobs(where: str, durability: str = "process") -> BlobStore:
    """A store for a directory or a URL. `durability` is what a put survives: `process` or `power`."""
    return FsspecBlobs(where) if "://" in where else DirectoryBlobs(Path(where), durability)
