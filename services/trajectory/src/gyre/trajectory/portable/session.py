"""What a reader of a foreign format gives: one session, ready to be recorded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from gyre.trajectory.portable.deltas import ForeignCall

Beside = Callable[[str], bytes | None]  # content of a file by its name relative to the trace's, None: there is none


@dataclass(frozen=True, slots=True)
class Trace:
    """One file as it was read. `beside` reads the files next to it."""

    name: str
    data: bytes
    beside: Beside = lambda name: None


@dataclass(frozen=True, slots=True)
class Options:
    """How to read. `main_only`: without sub-agents in files of their own; `as_bytes`: texts instead of ids."""

    main_only: bool = False
    as_bytes: bool = False


@dataclass(slots=True)
class Session:
    """One execution of another tool.

    unit       what one id stands for: token, byte, or block
    calls      made while they are taken, so that whole prompts need not be held together
    num_files  files it came from, once all calls are taken
    facts      further numbers worth printing, once all calls are taken
    """

    name: str
    format: str
    unit: str
    calls: Iterator[ForeignCall]
    num_files: int = 1
    facts: dict[str, int] = field(default_factory=dict)


def is_inside(path: str) -> bool:
    """Whether a relative path stays in the directory of the trace or below it."""
    parts = PurePosixPath(path.replace("\\", "/"))
    return bool(path) and not parts.is_absolute() and ".." not in parts.parts and ":" not in path
