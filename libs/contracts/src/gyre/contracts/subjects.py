"""The one table: event type -> record, subject, stream. Everything that names a subject reads it here.

A subject is `gyre.v1.<domain>.<run>.<entity>.<event>`; `<entity>` is the key of the aggregate the fact is about
(a group, an execution, a cell), taken from the record. The domain decides the stream; each stream has one owner.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gyre.contracts import events as e
from gyre.contracts.errors import UnknownType
from gyre.contracts.ids import check_id

PREFIX = "gyre.v1"


@dataclass(frozen=True, slots=True)
class Stream:
    """One JetStream stream. `work_queue`: a message is gone once one consumer acknowledged it."""

    name: str
    domain: str
    owner: str
    work_queue: bool = False

    @property
    def subjects(self) -> str:
        return f"{PREFIX}.{self.domain}.>"


CTL = Stream("GYRE_CTL", "ctl", "scheduler")
EXEC = Stream("GYRE_EXEC", "exec", "rollout")
CALL = Stream("GYRE_CALL", "call", "rollout")
EVAL = Stream("GYRE_EVAL", "eval", "rollout", work_queue=True)
REWARD = Stream("GYRE_REWARD", "reward", "reward")
TRAJ = Stream("GYRE_TRAJ", "traj", "trajectory")
TRAIN = Stream("GYRE_TRAIN", "train", "trainer")
DLQ = Stream("GYRE_DLQ", "dlq", "any")
STREAMS: tuple[Stream, ...] = (CTL, EXEC, CALL, EVAL, REWARD, TRAJ, TRAIN, DLQ)


@dataclass(frozen=True, slots=True)
class Row:
    """`type` travels in the envelope; `entity` names the aggregate; `key` is what makes the fact unique in a run."""

    type: str
    record: type
    stream: Stream
    event: str
    entity: Callable[[e.Fact], str]
    key: Callable[[e.Fact], str]


def _row(type_: str, record: type, stream: Stream, entity: Callable[..., str], key: Callable[..., str]) -> Row:
    return Row(type_, record, stream, type_.replace(".", "-"), entity, key)


def _cell(f: e.CellRoleAssigned) -> str:
    return f"cell-{f.cell}"


def _cell_epoch(f: e.CellRoleAssigned) -> str:
    return f"{f.cell}.{f.epoch}"


def _ready(f: e.CellRolloutReady) -> str:
    return f"{f.cell}.{f.epoch}.{f.version}" + (f".{f.incarnation}" if f.incarnation else "")


TABLE: tuple[Row, ...] = (
    _row("lease.taken", e.LeaseTaken, CTL, lambda f: "scheduler", lambda f: f"{f.holder}.{f.term}"),
    _row("run.opened", e.RunOpened, CTL, lambda f: "run", lambda f: str(f.opening)),
    _row("run.stop.requested", e.RunStopRequested, CTL, lambda f: "run", lambda f: str(f.opening)),
    _row("run.closed", e.RunClosed, CTL, lambda f: "run", lambda f: str(f.opening)),
    _row("burst.opened", e.BurstOpened, CTL, lambda f: f"burst-{f.burst}", lambda f: str(f.burst)),
    _row("burst.closed", e.BurstClosed, CTL, lambda f: f"burst-{f.burst}", lambda f: str(f.burst)),
    _row("group.dispatched", e.GroupDispatched, CTL, lambda f: f.group, lambda f: f.group),
    _row("cell.role.assigned", e.CellRoleAssigned, CTL, _cell, _cell_epoch),
    _row("execution.started", e.ExecutionStarted, EXEC, lambda f: f.execution, lambda f: f.execution),
    _row("execution.terminated", e.ExecutionTerminated, EXEC, lambda f: f.execution, lambda f: f.execution),
    _row("contexts.reported", e.ContextsReported, EXEC, lambda f: "contexts", lambda f: str(f.serial)),
    _row("cell.rollout.released", e.CellRolloutReleased, EXEC, _cell, _cell_epoch),
    _row("cell.rollout.ready", e.CellRolloutReady, EXEC, _cell, _ready),
    _row("cell.rollout.lost", e.CellRolloutLost, EXEC, _cell, lambda f: f"{f.cell}.{f.incarnation}"),
    _row("call.recorded", e.CallRecorded, CALL, lambda f: f.execution, lambda f: f.call),
    _row("evaluation.requested", e.EvaluationRequested, EVAL, lambda f: f.execution, lambda f: f.execution),
    _row("execution.scored", e.ExecutionScored, REWARD, lambda f: f.execution, lambda f: f.execution),
    _row("execution.unscorable", e.ExecutionUnscorable, REWARD, lambda f: f.execution, lambda f: f.execution),
    _row("group.completed", e.GroupCompleted, TRAJ, lambda f: f.group, lambda f: f.group),
    _row("step.sealed", e.StepSealed, TRAIN, lambda f: f"step-{f.step}", lambda f: str(f.step)),
    _row("step.finished", e.StepFinished, TRAIN, lambda f: f"step-{f.step}", lambda f: str(f.step)),
    _row("weights.published", e.WeightsPublished, TRAIN, lambda f: "weights", lambda f: f"v{f.version}"),
    _row("cell.train.joined", e.CellTrainJoined, TRAIN, _cell, _cell_epoch),
    _row("cell.train.released", e.CellTrainReleased, TRAIN, _cell, _cell_epoch),
    _row("backlog.reported", e.BacklogReported, TRAIN, lambda f: "backlog", lambda f: str(f.serial)),
    _row("message.dead-lettered", e.DeadLettered, DLQ, lambda f: f.consumer, lambda f: f"{f.stream}.{f.sequence}"),
)

BY_TYPE: dict[str, Row] = {row.type: row for row in TABLE}
BY_RECORD: dict[type, Row] = {row.record: row for row in TABLE}


def row_of(fact: e.Fact) -> Row:
    """The table row of a fact. Raises UnknownType for anything that is not a fact."""
    try:
        return BY_RECORD[type(fact)]
    except KeyError:
        raise UnknownType(f"{type(fact).__name__} is not a fact; see gyre.contracts.subjects.TABLE") from None


def subject_of(fact: e.Fact, run: str) -> str:
    """The subject on which `fact` of `run` is published. Raises InvalidId for an unusable run or entity."""
    row = row_of(fact)
    return f"{PREFIX}.{row.stream.domain}.{check_id(run, 'run')}.{check_id(row.entity(fact), 'entity')}.{row.event}"


def message_id(fact: e.Fact, run: str) -> str:
    """`Nats-Msg-Id` of a fact: the same fact said twice has the same id."""
    row = row_of(fact)
    return f"{run}/{row.type}/{row.key(fact)}"


def filter_of(run: str, record: type) -> str:
    """The subject filter that matches every fact of type `record` of `run`."""
    row = BY_RECORD[record]
    return f"{PREFIX}.{row.stream.domain}.{check_id(run, 'run')}.*.{row.event}"
