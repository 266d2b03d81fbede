"""What the rollout core is told by its own shell (local events, journalled) and what it asks of it (effects)."""

from dataclasses import dataclass, field
from typing import Literal

from gyre.contracts.events import BlobRef, CallRecorded, ExecutionSpec, Purpose, WeightsPublished

Limit = Literal["harness_timeout", "overall_timeout", "calls"]

# ---------------------------------------------------------------- local events


@dataclass(frozen=True, slots=True)
class HarnessStarted:
    """The harness process runs; `pid` is that of its shim."""

    execution: str
    pid: int


@dataclass(frozen=True, slots=True)
class HarnessNotStarted:
    """The harness could not be started; nothing of it runs."""

    execution: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class CallFinished:
    """A call is archived and may be published. `stall_s`: time without an engine since the call before it."""

    record: CallRecorded
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LimitFired:
    """A limit of the execution was reached."""

    execution: str
    limit: Limit


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The harness and everything it started is gone. `exit_code` None: nobody knows how; `reason` says why.

    `undelivered`: calls whose answer never reached it, as far as the gateway can tell.
    """

    execution: str
    exit_code: int | None
    num_errors: int = 0
    reason: str = ""
    undelivered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkspacePreserved:
    """The workspace is in the blob store, or cannot be (`snapshot` None). `reason` also names what was left out."""

    execution: str
    snapshot: BlobRef | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineAsleep:
    """The cell's engine sleeps under `epoch`; its calls were moved or replayed."""

    cell: int
    epoch: int
    num_moved: int
    num_replayed: int


@dataclass(frozen=True, slots=True)
class EngineServing:
    """The cell's engine serves `version` under `epoch`, verified and probed, admission open."""

    cell: int
    epoch: int
    version: int
    checksum: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The cell's engine was to serve under `epoch`, and has not for longer than a restart takes: out of reach, or refusing."""

    cell: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ContextsDue:
    """It is time to say how long the contexts of the running executions are, if that has changed."""


@dataclass(frozen=True, slots=True)
class ServiceWasAway:
    """This service did not run for `seconds`; harnesses waited meanwhile."""

    seconds: float


LOCAL_EVENTS: tuple[type, ...] = (HarnessStarted, HarnessNotStarted, CallFinished, LimitFired, ProcessExited,
                                  WorkspacePreserved, EngineAsleep, EngineServing, EngineLost, ContextsDue, ServiceWasAway)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartHarness:
    """Open the session, materialise the workspace and start the harness, or adopt one that runs already.

    `is_running`: it was running before a restart; if nothing of it is left, that is its end and not a reason to start.
    """

    execution: str
    group: str
    task: str
    purpose: Purpose
    spec: ExecutionSpec
    is_running: bool = False


@dataclass(frozen=True, slots=True)
class KillHarness:
    """Close the session and end everything the harness started; then report `ProcessExited`."""

    execution: str


@dataclass(frozen=True, slots=True)
class PreserveWorkspace:
    """Close the session, pack the workspace into the blob store, report `WorkspacePreserved`."""

    execution: str


@dataclass(frozen=True, slots=True)
class DiscardExecution:
    """The execution has terminated: forget its session, archive, processes and directory."""

    execution: str


@dataclass(frozen=True, slots=True)
class SettleCell:
    """Bring the cell's engine to what is wanted and keep it there: asleep, or serving `weights`.

    `weights` None with `serve` True: the weights of the assigned version are not published yet, so wait.
    `is_confirmed`: that the cell has come into this role was said already, so that this is no part of its transition.
    """

    cell: int
    epoch: int
    serve: bool
    weights: WeightsPublished | None = None
    is_confirmed: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class OpenGateway:
    """The sessions of all live executions are open: harnesses may be answered from now on.

    `away_s`: how long this service did not run; report `ServiceWasAway`. `may_sweep`: executions that are not `live` have
    terminated, what is left of them may go.
    """

    away_s: float
    live: tuple[str, ...]
    may_sweep: bool


Effect = OpenGateway | StartHarness | KillHarness | PreserveWorkspace | DiscardExecution | SettleCell
