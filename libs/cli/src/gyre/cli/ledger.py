"""The ledger of a run: its facts, folded in any order, and everything that is asked of them."""

from dataclasses import dataclass

from gyre.cli import conservation, views
from gyre.cli.facts import FactLog, filters_of
from gyre.contracts import events as e
from gyre.contracts.subjects import STREAMS
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import Bus


@dataclass(slots=True)
class RunLedger(FactLog):
    """Facts come in through `fold` or `fold_message`; what is asked is derived from those that are there."""

    @property
    def steps(self) -> list[views.Step]:
        """Finished steps in order."""
        return views.steps(self)

    @property
    def executions(self) -> dict[str, views.Execution]:
        """Every execution that any fact names, by id."""
        return views.executions(self)

    @property
    def num_executions(self) -> int:
        """Executions that were dispatched, for training and for evaluation."""
        return sum(len(d.fact.executions) for d in self.all(e.GroupDispatched).values())

    @property
    def num_timeouts_scored(self) -> int:
        """Training executions that a limit ended and whose workspace was scored."""
        outcomes = (o for c in self.all(e.GroupCompleted).values() if c.fact.purpose == "train"
                    for o in c.fact.outcomes)
        return sum(o.ending == "timed_out" and o.kind == "scored" for o in outcomes)

    def evaluation(self, label: str) -> views.Evaluation:
        """The held-out evaluation `before` or `after`."""
        return views.evaluation(self, label)

    def targets(self) -> conservation.Targets:
        """Where the targets of the completed training groups went."""
        return conservation.targets(self)

    def checks(self) -> tuple[conservation.Check, ...]:
        """Whether the books balance."""
        return conservation.check_all(self)

    @property
    def is_complete(self) -> bool:
        """Whether the run is closed and everything that its closing implies has been read, from every stream."""
        closed = [c.fact.version for c in self.all(e.RunClosed).values()]
        if not closed or views.num_live(self):
            return False
        open_groups = self.facts.get(e.GroupDispatched, {}).keys() - self.facts.get(e.GroupCompleted, {}).keys()
        finished = max((s.fact.version for s in self.all(e.StepFinished).values()), default=0)
        first = min((o.fact.first_version for o in self.all(e.RunOpened).values()), default=0)
        made = sum(t.fact.num_calls for t in self.all(e.ExecutionTerminated).values())
        return not open_groups and max(finished, first) >= max(closed) and len(self.calls) >= made


async def load_ledger(bus: Bus, run: str, blobs: BlobStore | None = None, with_calls: bool = True) -> RunLedger:
    """Read what the streams hold of `run` now. `with_calls` False leaves out the call records, by far the most.

    Raises:
        BusError: NATS refused or is gone. InvalidId: `run` is no id.
    """
    ledger = RunLedger(run)
    for stream in STREAMS:
        filters = filters_of(stream, run, with_calls)
        for received in await bus.read_all(stream, filters) if filters else ():
            ledger.fold_message(received.data, blobs)
    return ledger
