"""What the router knows of the engines: who admits, what each said of itself, who serves and remembers which execution."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gyre.rollout import placement
from gyre.rollout.engine_client import Observed
from gyre.rollout.migration import EnginePeer
from gyre.rollout.placement import Candidate

if TYPE_CHECKING:
    from gyre.rollout.live_call import LiveCall

Availability = Callable[[int], float]
UNKNOWN = Observed(-1, True, False)


def leaves_in_order(cell: int) -> float:
    """Cells leave rollout in order, so a higher one stays longer."""
    return float(cell)


@dataclass(slots=True)
class MoveCounts:
    """What became of calls that left an engine before they ended, since the service started."""

    num_moved: int = 0
    num_prefixes_moved: int = 0
    num_tokens_moved: int = 0
    num_bytes_moved: int = 0
    num_tokens_recomputed: int = 0  # of calls that came to an engine a second time
    replayed: Counter[str] = field(default_factory=Counter)  # by reason


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. `live` calls are on it; `pledged`: tokens that each ticket on its way to it was promised room for."""

    cell: int
    peer: EnginePeer
    admitting: bool = False
    said: Observed = UNKNOWN
    pledged: dict[str, int] = field(default_factory=dict)
    live: "set[LiveCall]" = field(default_factory=set)


class Routes:
    """The table of engines and executions. One event loop owns it.

    `availability(cell)` grows with the time the cell will stay in rollout; `max_live`: calls an engine runs at once.
    """

    def __init__(self, peers: Mapping[int, EnginePeer], availability: Availability = leaves_in_order,
                 max_live: int = 2**31) -> None:
        self.engines = {cell: Engine(cell, peer) for cell, peer in peers.items()}
        self.admits = asyncio.Event()
        self.affinity: dict[str, int] = {}
        self.arriving: dict[str, asyncio.Task[None]] = {}  # executions whose cached prefix is on its way
        self._availability = availability
        self._max_live = max_live
        self.counts = MoveCounts()
        self._held: dict[str, dict[int, int]] = {}

    def set_admitting(self, cell: int, admitting: bool) -> None:
        """Open or stop an engine for new calls; live ones go on."""
        self.engines[cell].admitting = admitting
        if any(e.admitting for e in self.engines.values()):
            self.admits.set()
        else:
            self.admits.clear()

    def observe(self, cell: int, said: Observed | None) -> None:
        """What an engine says of itself; None: it cannot be reached. KV of another version, or asleep, is gone."""
        engine = self.engines[cell]
        if said is None or said.asleep or said.version != engine.said.version:
            for cells in self._held.values():
                cells.pop(cell, None)
        engine.said = said or UNKNOWN

    def holds(self, execution: str, cell: int, num_tokens: int) -> None:
        """The engine has KV of that many tokens of the execution."""
        cells = self._held.setdefault(execution, {})
        cells[cell] = max(num_tokens, cells.get(cell, 0))

    def num_held(self, execution: str, cell: int) -> int:
        """Tokens of the execution whose KV the engine is thought to have."""
        return self._held.get(execution, {}).get(cell, 0)

    def forget(self, execution: str) -> None:
        """The execution has ended."""
        self.affinity.pop(execution, None)
        self._held.pop(execution, None)

    def home(self, execution: str) -> Engine:
        """The engine for the execution's next call: the one before if it admits. At least one must admit."""
        engine = self.engines.get(self.affinity.get(execution, -1))
        if engine is None or not engine.admitting:
            engine = self.engines[placement.home(self._candidates(execution))]
            self.affinity[execution] = engine.cell
        return engine

    def destinations(self, execution: str, num_tokens: int) -> list[Engine]:
        """Engines to which what grows to `num_tokens` tokens may leave for, best first."""
        return [self.engines[c] for c in placement.destinations(self._candidates(execution), num_tokens)]

    def idle_on(self, cell: int) -> list[str]:
        """Executions that are at home on the engine and have no live call anywhere."""
        busy = {call.job.execution for engine in self.engines.values() for call in engine.live}
        return [execution for execution, home in self.affinity.items() if home == cell and execution not in busy]

    def _candidates(self, execution: str) -> list[Candidate]:
        return [Candidate(e.cell, self._availability(e.cell), self.num_held(execution, e.cell), _kv_free(e),
                          len(e.live) + len(e.pledged), self._max_live)
                for e in self.engines.values() if e.admitting]


def _kv_free(engine: Engine) -> int:
    if engine.said.kv_tokens_total == 0:
        return placement.ROOM_UNKNOWN
    return max(0, engine.said.kv_tokens_free - sum(engine.pledged.values()))
