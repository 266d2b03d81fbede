"""The life of one execution, pure: every dispatched execution ends exactly once, whatever dies meanwhile.

    dispatched -> starting -> running -> ending -> preserving -> terminated
                     |           |                    ^
                     |           +-- exits by itself -+
                     +-- cannot be started -> terminated (dropped)

`ending`: a limit fired and the harness is being killed. The ending that is reported is that of the first limit, or how
the harness exited if none fired before it did.
"""

from dataclasses import dataclass, replace
from typing import Literal

from gyre.contracts.events import Ending, ExecutionSpec, Purpose
from gyre.contracts.ids import call_id
from gyre.rollout.local import Limit, ProcessExited

Phase = Literal["dispatched", "starting", "running", "ending", "preserving"]
MAX_STARTS = 2


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution that has not terminated. Times are seconds since the epoch."""

    spec: ExecutionSpec
    group: str
    query: str
    task: str
    purpose: Purpose
    version: int
    phase: Phase = "dispatched"
    starting_at: float = 0.0
    started_at: float = 0.0
    num_starts: int = 0
    num_calls: int = 0
    stall_s: float = 0.0
    pid: int = 0
    limit: Limit | Literal[""] = ""
    exit_code: int | None = None
    ending: Ending = "finished"
    reason: str = ""
    num_errors: int = 0
    ended_at: float = 0.0
    undelivered: tuple[str, ...] = ()
    context: int = 0  # tokens of the newest call, prompt and output
    max_context: int = 0

    @property
    def id(self) -> str:
        return self.spec.execution

    @property
    def takes_calls(self) -> bool:
        """Whether a call that finishes now counts."""
        return self.phase in ("starting", "running")


def starting(execution: Execution, now: float) -> Execution:
    """A start is under way; the overall timeout counts from the first one."""
    first = execution.starting_at or now
    return replace(execution, phase="starting", starting_at=first, num_starts=execution.num_starts + 1)


def running(execution: Execution, pid: int, now: float) -> Execution:
    """The harness runs. An execution that a limit hit while it started stays `ending`."""
    if execution.phase != "starting":
        return execution
    return replace(execution, phase="running", pid=pid, started_at=now)


def called(execution: Execution, stall_s: float, context: int) -> Execution:
    """One more call is recorded; `context`: tokens of its prompt and output."""
    return replace(execution, num_calls=execution.num_calls + 1, stall_s=execution.stall_s + stall_s, context=context,
                   max_context=max(execution.max_context, context))


def limited(execution: Execution, limit: Limit) -> Execution | None:
    """The execution that is to be killed because of `limit`; None if it ends or waits already."""
    if execution.phase not in ("starting", "running"):
        return None
    ending: Ending = "dropped" if limit == "overall_timeout" else "timed_out"
    return replace(execution, phase="ending", limit=limit, ending=ending)


def exited(execution: Execution, event: ProcessExited, now: float) -> Execution | None:
    """The execution once its harness is gone; None if that was known."""
    if execution.phase not in ("starting", "running", "ending"):
        return None
    execution = replace(execution, exit_code=event.exit_code, num_errors=event.num_errors, ended_at=now,
                        reason=event.reason, undelivered=_recorded(execution, event.undelivered))
    if execution.phase != "ending":
        execution = replace(execution, ending=_own_ending(event.exit_code))
    return replace(execution, phase="preserving")


def _recorded(execution: Execution, calls: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `calls` that count; a call that was cut off on its way here does not."""
    known = {call_id(execution.id, index) for index in range(execution.num_calls)}
    return tuple(c for c in calls if c in known)


def _own_ending(exit_code: int | None) -> Ending:
    """How a harness ended that no limit ended. Without any code somebody killed harness and shim: not its own doing."""
    if exit_code is None:
        return "dropped"
    return "finished" if exit_code == 0 else "failed"


def due_limit(execution: Execution, now: float, stall_s: float) -> Limit | None:
    """The limit that has been reached. `stall_s`: stalls not yet in the execution; the harness gets stalls back."""
    if execution.phase not in ("starting", "running"):
        return None
    if now - execution.starting_at >= execution.spec.overall_timeout_s:
        return "overall_timeout"
    if execution.phase == "running" and now - execution.started_at - execution.stall_s - stall_s >= execution.spec.timeout_s:
        return "harness_timeout"
    return None
