"""Every fact, as a frozen record. One section per owner; nobody else may publish its facts.

Facts are past tense and may not be refused. A receiver ignores fields it does not know, and a new field
must have a default, so that releases N and N-1 understand each other.
Token arrays are int32, logprobs float32, both of shape [T].
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from gyre.contracts.errors import BrokenBody

Role = Literal["rollout", "train"]
Purpose = Literal["train", "eval"]
Ending = Literal["finished", "failed", "timed_out", "dropped"]
OutcomeKind = Literal["scored", "placeholder", "unscorable", "dropped"]
FinishReason = Literal["stop", "length", "abort", "error"]
RoleClass = Literal["main", "main-summary", "sub-agent", "sub-agent-summary"]
Signal = Literal["compared", "no_votes", "one_vote", "zero_variance"]


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Bytes in the blob store: `path` under the store's root, blake2b-128 `digest`, `size` in bytes."""

    path: str
    digest: str
    size: int


# ---------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """`holder` leads from now on. Every other fact of the scheduler is conditional on this message's sequence."""

    holder: str
    term: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class RunOpened:
    """The run may dispatch. `config_digest` says under which resolved configuration."""

    config_digest: str
    seed: int
    num_cells: int
    first_version: int = 0
    first_query: int = 0
    opening: int = 0  # a run that was stopped may be opened again
    num_standalone: int = 0  # rollout cells that never train, numbered after the others
    schedule: str = ""


@dataclass(frozen=True, slots=True)
class RunStopRequested:
    """Opening `opening` ends after its open burst, because of `reason`."""

    reason: str
    opening: int


@dataclass(frozen=True, slots=True)
class RunClosed:
    """Nothing is dispatched any more; `reason` is `completed` or `stopped: ...`."""

    reason: str
    version: int
    opening: int = 0


@dataclass(frozen=True, slots=True)
class BurstOpened:
    """Burst `burst` trains `num_steps` steps beginning at weights version `version`."""

    burst: int
    version: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class BurstClosed:
    """All steps of the burst are done and every cell that trained is back in rollout."""

    burst: int
    version: int


@dataclass(frozen=True, slots=True)
class ExecutionSpec:
    """One execution to run. `timeout_calls` ends it while it waits for its n-th call (None: no such limit)."""

    execution: str
    seed: int
    timeout_s: float
    overall_timeout_s: float
    timeout_calls: int | None = None


@dataclass(frozen=True, slots=True)
class GroupDispatched:
    """`executions` of one query are to be run and compared with each other."""

    group: str
    burst: int
    query: str
    task: str
    purpose: Purpose
    version: int
    executions: tuple[ExecutionSpec, ...]
    label: str = ""


@dataclass(frozen=True, slots=True)
class CellRoleAssigned:
    """Cell `cell` has role `role` from epoch `epoch` on; an epoch that is not newer is ignored.

    `reason`: why the cell does not keep the role it was given before, if that role was never confirmed or is recalled.
    """

    cell: int
    epoch: int
    role: Role
    transition: str
    version: int
    reason: str = ""


# ---------------------------------------------------------------- rollout


@dataclass(frozen=True, slots=True)
class ExecutionStarted:
    """A harness process runs in its own workspace."""

    execution: str
    group: str
    purpose: Purpose
    version: int


@dataclass(frozen=True, slots=True)
class ExecutionTerminated:
    """The harness ended. `limit` names the limit that fired; `snapshot` is the preserved workspace."""

    execution: str
    group: str
    query: str
    purpose: Purpose
    ending: Ending
    num_calls: int
    wall_s: float
    snapshot: BlobRef | None = None
    limit: str = ""
    reason: str = ""
    exit_code: int | None = None
    num_harness_errors: int = 0
    stall_s: float = 0.0
    undelivered: tuple[str, ...] = ()  # recorded calls whose answer never reached the harness
    max_context: int = 0  # tokens of its longest call, prompt and output


@dataclass(frozen=True, slots=True)
class ContextsReported:
    """Tokens that each running execution last had in its context, for those that have made a call."""

    serial: int
    contexts: dict[str, int]


@dataclass(frozen=True, slots=True)
class EvaluationRequested:
    """Work for one evaluator: score `snapshot` against the hidden checks of `task`."""

    execution: str
    group: str
    query: str
    task: str
    purpose: Purpose
    ending: Ending
    snapshot: BlobRef


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) of a call were sampled under weights `version`.

    `kv_version`: the oldest weights version of any key or value they attended to; None: `version` itself.
    """

    start: int
    end: int
    version: int
    kv_version: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling distribution of a call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CallEvidence:
    """Whose call it may be: what the request says of itself, and what its text shows. Never used for routing.

    tags     what the harness says: headers and metadata of known harnesses, by lower-case name
    replays  the latest earlier call whose answer stands among the messages as the assistant's
    quotes   earlier calls whose whole answer stands in a message of somebody else, oldest first
    task_of  the call with an unanswered tool call of which the first user text is an argument
    continues  the prompt goes on with the context of its base call, up to what the chat template itself takes back

    Quotes, replays and tasks are looked for only where a context begins that continues no earlier one.
    """

    tags: dict[str, str] = field(default_factory=dict)
    replays: str | None = None
    quotes: tuple[str, ...] = ()
    task_of: str | None = None
    continues: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CallRecorded:
    """One model call as a delta against the call it continues.

    The prompt is `sequence(base_call)[:keep_len] + prompt_delta`, where `sequence` is prompt plus output.
    `digest` is `gyre.contracts.digest.token_digest` of prompt + output. `logprobs` are those of the untempered
    policy (T=1), `behaviour_logprobs` those of the distribution that was really sampled; both [len(output_ids)].
    `role_class` and `lineage` are what the harness said (`main` if it said nothing); `routed_experts` is room for a
    mixture-of-experts policy: int16 [prompt_len + len(output_ids), layers, experts per token] in the blob store.

    Whether the parts fit together is for `call_fault` to say, so that a record that does not fit can be refused by name.

    Raises:
        BrokenBody: an array has the wrong dtype or shape.
    """

    execution: str
    group: str
    call: str
    index: int
    base_call: str | None
    keep_len: int
    prompt_len: int
    prompt_delta: np.ndarray
    output_ids: np.ndarray
    logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    digest: str
    model: str = "policy"
    role_class: RoleClass = "main"
    lineage: str = "main"
    sampling: Sampling = field(default_factory=Sampling)
    cell: int = 0
    routed_experts: BlobRef | None = None
    evidence: CallEvidence = field(default_factory=CallEvidence)

    def __post_init__(self) -> None:
        for name, dtype in _CALL_ARRAYS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise BrokenBody(f"call.recorded.{name}: expected a vector of {dtype}, got {_kind(array)}")


def call_fault(record: CallRecorded) -> str:
    """What does not fit together in a record, or "". Nobody may publish, and nobody takes, a record with a fault."""
    num = len(record.output_ids)
    if len(record.logprobs) != num or len(record.behaviour_logprobs) != num:
        return (f"{num} output ids but {len(record.logprobs)} logprobs and {len(record.behaviour_logprobs)} "
                "behaviour logprobs")
    if record.keep_len + len(record.prompt_delta) != record.prompt_len:
        return f"keep_len {record.keep_len} + delta {len(record.prompt_delta)} is not prompt_len {record.prompt_len}"
    if [i for s in record.spans for i in (s.start, s.end)] != _span_edges(record.spans, num):
        return f"spans {record.spans} do not cover {num} output tokens exactly"
    return _out_of_range(record)


def _out_of_range(record: CallRecorded) -> str:
    """An edge, a version or an id that no cover, no weights and no vocabulary can have, or ""."""
    for s in record.spans:
        if s.start > s.end:
            return f"span {s} ends before it begins"
        if not 0 <= s.version <= _MAX_INT32:
            return f"span {s}: version is not in [0, 2^31)"
    lowest = min((int(ids.min()) for ids in (record.prompt_delta, record.output_ids) if len(ids)), default=0)
    return f"token id {lowest} is negative" if lowest < 0 else ""


_MAX_INT32 = 2**31 - 1
_CALL_ARRAYS = {"prompt_delta": np.dtype(np.int32), "output_ids": np.dtype(np.int32),
                "logprobs": np.dtype(np.float32), "behaviour_logprobs": np.dtype(np.float32)}


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _span_edges(spans: tuple[VersionSpan, ...], num: int) -> list[int]:
    """The edges a gapless cover of [0, num) by `spans` must have."""
    ends = [s.end for s in spans]
    edges = [e for pair in zip([0, *ends[:-1]], ends, strict=True) for e in pair] if spans else []
    return edges if (ends[-1] if ends else 0) == num else [-1]


@dataclass(frozen=True, slots=True)
class CellRolloutReleased:
    """The cell's engine sleeps and its devices are free for the trainer."""

    cell: int
    epoch: int
    num_moved: int = 0
    num_replayed: int = 0


@dataclass(frozen=True, slots=True)
class CellRolloutReady:
    """The cell's engine serves `version`, verified against `checksum`, probe answered, admission open.

    `incarnation`: how often the engine was lost before.
    """

    cell: int
    epoch: int
    version: int
    checksum: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class CellRolloutLost:
    """The cell's engine should serve and does not, out of reach or refusing; `incarnation` counts such losses from 1."""

    cell: int
    epoch: int
    incarnation: int
    reason: str


# ---------------------------------------------------------------- reward


@dataclass(frozen=True, slots=True)
class ExecutionScored:
    """The preserved workspace was scored. `placeholder`: the agent left nothing gradable, reward 0 stands in."""

    execution: str
    group: str
    reward: float
    num_passed: int
    num_checks: int
    evaluator: str
    placeholder: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class ExecutionUnscorable:
    """Evaluation failed within its budget; the execution leaves the step. This is never a zero."""

    execution: str
    group: str
    reason: str
    evaluator: str
    attempts: int = 1


# ---------------------------------------------------------------- trajectory


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """What one role class had in an execution: calls, sampled tokens, admitted paths, targets those paths own."""

    num_calls: int = 0
    num_sampled: int = 0
    num_paths: int = 0
    num_trained: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one execution of a group.

    `drops` counts targets that are not trained, by reason; `not_targets` sampled positions that are none: the agent never
    saw them, the harness does not want them trained, or nothing comes before them that could score them. `roles` has the
    role classes that occurred; `num_unknown_roots`: contexts nothing is known of, taken as `main`.
    """

    execution: str
    kind: OutcomeKind
    ending: Ending
    reward: float
    advantage: float
    num_calls: int
    num_targets: int
    num_trained_targets: int
    drops: dict[str, int] = field(default_factory=dict)
    num_unique_tokens: int = 0
    num_flat_tokens: int = 0
    num_sampled_tokens: int = 0
    reason: str = ""
    roles: dict[RoleClass, RoleCounts] = field(default_factory=dict)
    num_unknown_roots: int = 0
    not_targets: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroStepRef:
    """One immutable micro-step in the blob store. `cost` = a*tokens + b*visible pairs.

    `oversize`: a single path that is longer than the budget; whoever claims it has to bound its own memory.
    """

    micro_step: str
    digest: str
    cost: float
    num_tokens: int
    num_targets: int
    num_executions: int
    blob: BlobRef
    oversize: bool = False


@dataclass(frozen=True, slots=True)
class GroupCompleted:
    """Every execution of the group is accounted for. Published exactly once per group, also with nothing to train.

    `num_scored` is m_g: the executions of kind `scored`. `signal` says whether rewards can be compared: with fewer
    than two votes, or with equal ones, every advantage is 0.
    """

    group: str
    burst: int
    query: str
    purpose: Purpose
    version: int
    outcomes: tuple[Outcome, ...]
    num_scored: int
    reward_mean: float
    reward_std: float
    micro_steps: tuple[MicroStepRef, ...]
    label: str = ""
    signal: Signal = "compared"


# ---------------------------------------------------------------- trainer


@dataclass(frozen=True, slots=True)
class StepSealed:
    """The B-th group joined: membership and M = sum of m_g are final. Published once per step, on an empty subject."""

    step: int
    groups: tuple[str, ...]
    micro_steps: tuple[str, ...]
    num_scored: int
    stale_groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step is done; `version` = `step` + 1 also when it had nothing to train (`updated` False)."""

    step: int
    version: int
    attempt: int
    updated: bool
    num_scored: int
    num_targets: int
    num_tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    micro_steps_by_cell: dict[str, int] = field(default_factory=dict)
    executions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """Weights `version` are durable in `checkpoint` and readable one-sided at `transfer` (address of the core)."""

    version: int
    checksum: str
    burst: int
    checkpoint: str
    transfer: str = ""


@dataclass(frozen=True, slots=True)
class CellTrainJoined:
    """The cell's trainer holds the devices, has weights `version` and takes part in `step`."""

    cell: int
    epoch: int
    step: int
    version: int


@dataclass(frozen=True, slots=True)
class CellTrainReleased:
    """The cell's trainer is off the devices."""

    cell: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class BacklogReported:
    """What waits for training: groups complete but not in a step, and cost of unclaimed micro-steps.

    `micro_step_cost`: of one micro-step, on average. `cost_per_s`: what one cell gets done in a second; 0: not measured yet.
    """

    serial: int
    step: int
    num_groups_waiting: int
    unclaimed_cost: float
    micro_step_cost: float = 0.0
    cost_per_s: float = 0.0


# ---------------------------------------------------------------- anyone


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """A message no consumer could understand, kept with the reason."""

    stream: str
    subject: str
    sequence: int
    consumer: str
    reason: str
    body: bytes


Fact = (LeaseTaken | RunOpened | RunStopRequested | RunClosed | BurstOpened | BurstClosed | GroupDispatched | CellRoleAssigned
        | ExecutionStarted | ExecutionTerminated | ContextsReported | EvaluationRequested | CallRecorded
        | CellRolloutReleased | CellRolloutReady | CellRolloutLost | ExecutionScored | ExecutionUnscorable | GroupCompleted
        | StepSealed | StepFinished | WeightsPublished | CellTrainJoined | CellTrainReleased | BacklogReported | DeadLettered)
