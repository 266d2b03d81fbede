"""A preserved workspace: from the blob store into a fresh directory, without trusting a byte of it.

One bad member is left out and named; what makes the archive as a whole suspicious (too many entries, too many bytes,
not a tar) refuses the snapshot. Files are written before any link exists, so nothing can be written through a link.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import GyreError
from gyre.contracts.events import BlobRef
from gyre.reward.tar import MalformedTar, Member, read_members
from gyre.runtime.blobs import BlobStore

_NAME_BYTES = 255
_NAME_ERRORS = {errno.EILSEQ, errno.ENAMETOOLONG, errno.EINVAL}


class SnapshotRefused(GyreError):
    """The archive as a whole cannot be accepted. Trying again gives the same answer."""


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """What a workspace may be at most."""

    num_entries: int = 20_000
    total_bytes: int = 64 * 1024 * 1024
    path_bytes: int = 1024
    depth: int = 64

    @property
    def archive_bytes(self) -> int:
        """Largest archive that could hold an acceptable workspace: data, headers and padding."""
        return self.total_bytes + self.num_entries * 4 * 512 + 10_240


@dataclass(frozen=True, slots=True)
class Refusal:
    """A member that was left out."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Extracted:
    """A workspace on disk; `refused` names every member that is not there."""

    root: Path
    num_files: int
    num_bytes: int
    refused: tuple[Refusal, ...] = ()


def load_archive(blobs: BlobStore, ref: BlobRef, limits: SnapshotLimits) -> bytes:
    """The verified bytes of a snapshot; the stated size is checked before anything is read.

    Raises:
        SnapshotRefused: it is larger than any acceptable workspace.
        BrokenBody: it is missing or not what the reference says.
    """
    if ref.size > limits.archive_bytes:
        raise SnapshotRefused(f"snapshot {ref.path}: {ref.size} bytes, at most {limits.archive_bytes}")
    return blobs.get(ref)


def extract(archive: bytes, into: Path, limits: SnapshotLimits) -> Extracted:
    """Unpack `archive` into the new directory `into`.

    Raises:
        SnapshotRefused: not a tar, too many entries or too many bytes.
        FileExistsError: `into` exists already.
    """
    into.mkdir(mode=0o755)
    extraction = _Extraction(into, limits)
    try:
        for member in read_members(archive):
            extraction.take(member)
    except MalformedTar as error:
        raise SnapshotRefused(f"snapshot: not a tar archive {error}") from None
    extraction.make_links()
    return Extracted(into, extraction.num_files, extraction.num_bytes, tuple(extraction.refused))


class _Extraction:
    """The state of one `extract`."""

    def __init__(self, root: Path, limits: SnapshotLimits) -> None:
        self.root = root
        self.limits = limits
        self.num_entries = 0
        self.num_files = 0
        self.num_bytes = 0
        self.refused: list[Refusal] = []
        self._directories: set[str] = {""}
        self._links: list[tuple[str, str]] = []

    def take(self, member: Member) -> None:
        """Write one member, or note why not."""
        self.num_entries += 1
        if self.num_entries > self.limits.num_entries:
            raise SnapshotRefused(f"snapshot: more than {self.limits.num_entries} entries")
        self.num_bytes += len(member.data)
        if self.num_bytes > self.limits.total_bytes:
            raise SnapshotRefused(f"snapshot: more than {self.limits.total_bytes} bytes of files")
        path = _clean(member.path)
        reason = _path_problem(member.path, path, self.limits)
        if reason is None and member.kind == "other":
            reason = f"{member.what}; only files, directories and symbolic links are kept"
        if reason is None:
            reason = self._try_place(path, member)
        if reason is not None:
            self.refused.append(Refusal(member.path[:200], reason))

    def _try_place(self, path: str, member: Member) -> str | None:
        """As `_place`; a name this file system cannot hold is the member's fault, a full disk is not."""
        try:
            return self._place(path, member)
        except OSError as error:
            if error.errno not in _NAME_ERRORS:
                raise
            return f"the file system refuses its name: {error.strerror}"

    def _place(self, path: str, member: Member) -> str | None:
        if member.kind == "directory":
            return self._make_directory(path)
        if not path:
            return "it has no name"
        if problem := self._make_directory(path.rpartition("/")[0]):
            return problem
        if member.kind == "symlink":
            self._links.append((path, member.link))
            return None
        return self._write(path, member)

    def _make_directory(self, path: str) -> str | None:
        """Make `path` and its parents. Only files and directories exist at this time, so none of it is a link."""
        if path in self._directories:
            return None
        if problem := self._make_directory(path.rpartition("/")[0]):
            return problem
        try:
            (self.root / path).mkdir(mode=0o755)
        except FileExistsError:
            if not stat.S_ISDIR((self.root / path).lstat().st_mode):
                return "an earlier entry of that path is not a directory"
        self._directories.add(path)
        return None

    def _write(self, path: str, member: Member) -> str | None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.root / path, flags, 0o755 if member.executable else 0o644)
        except FileExistsError:
            return "an earlier entry has that path"
        with os.fdopen(fd, "wb") as file:
            file.write(member.data)
        self.num_files += 1
        return None

    def make_links(self) -> None:
        """Make the links that stay inside; remove those that turn out to lead outside through other links."""
        made: list[tuple[str, str]] = []
        for path, target in self._links:
            reason = _link_problem(target)
            if reason is None and os.path.lexists(self.root / path):
                reason = "an earlier entry has that path"
            if reason is not None:
                self.refused.append(Refusal(path, reason))
                continue
            (self.root / path).symlink_to(target)
            made.append((path, target))
        inside = os.path.realpath(self.root)
        for path, target in made:
            if os.path.commonpath([inside, os.path.realpath(self.root / path)]) != inside:
                (self.root / path).unlink()
                self.refused.append(Refusal(path, f"a link to {target[:200]!r}, outside the workspace"))
        self.num_files += sum(os.path.lexists(self.root / path) for path, _ in made)


def _clean(path: str) -> str:
    """`./a//b/` as `a/b`; everything dubious is left in for `_path_problem` to see."""
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def _path_problem(raw: str, path: str, limits: SnapshotLimits) -> str | None:
    parts = path.split("/")
    if raw.startswith("/"):
        return "an absolute path"
    if ".." in parts:
        return "a path that climbs out with '..'"
    encoded = raw.encode("utf-8", "surrogateescape")
    if b"\0" in encoded:
        return "a path with a NUL"
    if len(encoded) > limits.path_bytes or max(len(p.encode("utf-8", "surrogateescape")) for p in parts) > _NAME_BYTES:
        return f"a path longer than {limits.path_bytes} bytes, or a name longer than {_NAME_BYTES}"
    if len(parts) > limits.depth:
        return f"deeper than {limits.depth} directories"
    return None


def _link_problem(target: str) -> str | None:
    if target.startswith("/"):
        return f"a link to the absolute path {target[:200]!r}"
    if not target or "\0" in target or len(target) > 1024:
        return f"a link to {target[:200]!r}"
    return None
