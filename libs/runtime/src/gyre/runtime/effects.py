"""What a core may ask for, and what a core is.

A core is pure: `step` may read nothing but its arguments and may do nothing but return. The state passed in belongs to
the call, which may change it in place; the caller uses the returned one. Publishing is the one effect the runtime
performs itself (through the outbox); every other effect is a record of the service's own and is performed by its shell
after the commit.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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
