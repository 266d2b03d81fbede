"""What the executor knows of a harness: it can be started, adopted, asked whether it ended, and ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Launch:
    """One harness to run. `home` is the execution's directory; everything it may write lies below it.

    `environment` is all the harness sees, but for the path of `instruction`, which is added.
    """

    execution: str
    home: Path
    command: Sequence[str]
    environment: Mapping[str, str]

    @property
    def workspace(self) -> Path:
        return self.home / "workspace"

    @property
    def instruction(self) -> Path:
        return self.home / "input" / "instruction.md"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a harness ended. `code` None: nobody knows; `reason` says why."""

    code: int | None
    reason: str = ""


class Harness(Protocol):
    """Runs of one kind of harness, by execution directory, so that a restarted executor knows them again."""

    def start(self, launch: Launch) -> int:
        """Start it, unless one was started in this directory before; returns the pid of its keeper.

        Raises:
            HarnessError: it cannot be started.
        """
        ...

    def was_started(self, home: Path) -> bool:
        """Whether a harness was ever started in this directory."""
        ...

    def ended(self, home: Path) -> Exit | None:
        """How it ended; None while it runs."""
        ...

    def last_words(self, home: Path) -> str:
        """The end of what it wrote to its log."""
        ...

    def kill(self, home: Path, force: bool) -> int:
        """Signal everything it started (TERM, or KILL with `force`); returns how many processes there were."""
        ...
