"""What a core may ask for, and what a core is.

A core is pure: `step` may read nothing but its arguments and may do nothing but return. The state passed in belongs to
the call, which may change it in place; the caller uses the returned one. Publishing is the one effect the runtime
performs itself (through the outbox); every other effect is a record of the service's own and is performed by its shell
after the commit.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from gyre.contracts.events import Fact

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Publish:
    """Say `fact`; it survives a crash and a NATS outage. `trace`: context other than that of the causing event."""

    fact: Fact
    epoch: int = 0
    trace: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WriteBlob:
    """Put `data` at `path` in the blob store before anything published in the same step may be seen."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Delivered to every core about once a second."""


Effect = Any


class Core(Protocol[S]):
    """The decisions of one service."""

    local_events: tuple[type, ...]  # records other than facts that `step` takes; they are journalled too

    def initial(self) -> S: ...

    def step(self, state: S, event: Any, now: float) -> tuple[S, list[Effect]]: ...

    def resume(self, state: S, now: float) -> list[Effect]:
        """Effects that are outstanding in `state` after a restart (level-triggered)."""
        ...

    def snapshot(self, state: S) -> bytes: ...

    def restore(self, data: bytes) -> S: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """What changed in the large parts of a state: `rows` (name, bytes) are new, names that begin with `dropped` are gone."""

    rows: tuple[tuple[str, bytes], ...] = ()
    dropped: tuple[str, ...] = ()


@runtime_checkable
class KeepingCore(Core[S], Protocol[S]):
    """A core whose state has large parts that never change once they are there.

    They are written once, beside the snapshot and in its transaction, instead of with every snapshot; a snapshot then
    costs what is new, and a restart reads each part once.
    """

    def take_kept(self, state: S) -> Kept:
        """What changed since it was last asked for; the next `snapshot` goes with it."""
        ...

    def recall(self, state: S, name: str, data: bytes) -> None:
        """Put one kept part back into a restored state. Parts come in the order in which they were kept."""
        ...
