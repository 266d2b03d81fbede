"""The end of a group: from the facts of its executions to outcomes, micro-steps and tree files.

A pure function of the group's contents: computed twice, it gives the same bytes, so that writing the blobs before the
fact may be repeated after a crash.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gyre.contracts.digest import bytes_digest
from gyre.contracts.events import BlobRef, GroupCompleted, GroupDispatched, MicroStepRef, Outcome
from gyre.runtime.effects import WriteBlob
from gyre.trajectory.admission import Admission, admit
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.group import Standing, Statistics, group_advantages, signal, standing
from gyre.trajectory.inspection import Header, tree_file, tree_path
from gyre.trajectory.packing import Extent, Member, micro_step, pack
from gyre.trajectory.reading import Reading, read_execution
from gyre.trajectory.roles import RoleClassifier
from gyre.trajectory.state import ExecutionState, GroupState
from gyre.trajectory.targets import Eligibility


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """One execution that can no longer change. `admission` is None where nothing is trained."""

    execution: str
    state: ExecutionState
    standing: Standing
    reading: Reading
    advantage: float = 0.0
    admission: Admission | None = None


def complete(name: str, group: GroupState, config: TrajectoryConfig,
             roles: RoleClassifier) -> tuple[GroupCompleted, list[WriteBlob]]:
    """The fact that ends group `name`, and the blobs that must lie in the store before it may be seen."""
    dispatched = group.dispatched
    if dispatched is None or not group.complete:
        raise ValueError(f"group {name} is not complete")
    settled, stats, rewards = _settle(dispatched, group, config, roles)
    references, blobs = _micro_steps(name, settled, config)
    outcomes = tuple(_outcome(one, dispatched) for one in settled)
    for one, outcome in zip(settled, outcomes, strict=True):
        header = Header(dispatched.query, dispatched.group, dispatched.purpose, config.policy, outcome)
        file = tree_file(header, one.reading.tree, one.reading.targets, one.admission, one.reading.roles)
        blobs.append(WriteBlob(tree_path(one.execution), file.to_bytes()))
    num_scored = sum(one.standing.kind == "scored" for one in settled)
    fact = GroupCompleted(name, dispatched.burst, dispatched.query, dispatched.purpose, dispatched.version, outcomes,
                          num_scored, stats.mean, stats.std, references, dispatched.label, signal(rewards))
    return fact, blobs


def summary(fact: GroupCompleted) -> str:
    """One line for people."""
    kinds = Counter(outcome.kind for outcome in fact.outcomes)
    targets = sum(ref.num_targets for ref in fact.micro_steps)
    return (f"{', '.join(f'{num} {kind}' for kind, num in kinds.items()) or 'no executions'}; reward mean "
            f"{fact.reward_mean:.4g}, std {fact.reward_std:.4g}, {fact.signal.replace('_', ' ')}; "
            f"{len(fact.micro_steps)} micro-steps, {targets} targets")


def eligibility(state: ExecutionState, config: TrajectoryConfig) -> Eligibility:
    """Which calls of an execution have outputs that are targets."""
    undelivered = state.terminated.undelivered if state.terminated else ()
    return Eligibility(config.policy, frozenset(undelivered), config.train_unseen)


def _settle(dispatched: GroupDispatched, group: GroupState, config: TrajectoryConfig,
            roles: RoleClassifier) -> tuple[list[Settled], Statistics, list[float]]:
    members = list(group.members())
    standings = [standing(e.terminated, e.verdict, e.quarantine) for _, e in members if e.terminated is not None]
    advantages, stats = group_advantages(standings, config.advantage)
    settled: list[Settled] = []
    for (execution, state), its_standing, advantage in zip(members, standings, advantages, strict=True):
        reading = read_execution(state.log.ordered(), eligibility(state, config), roles)
        trains = (dispatched.purpose == "train" and its_standing.kind == "scored" and len(reading.targets) > 0
                  and (advantage != 0.0 or config.keep_zero_advantage))
        admission = _admit(execution, reading, config) if trains else None
        if dispatched.purpose == "eval":
            advantage = 0.0
        settled.append(Settled(execution, state, its_standing, reading, advantage, admission))
    return settled, stats, [s.reward for s in standings if s.votes]


def _admit(execution: str, reading: Reading, config: TrajectoryConfig) -> Admission:
    return admit(reading.tree, reading.targets, reading.leaf_roles(), config.role_order, config.max_paths,
                 (config.run, execution))


def _micro_steps(name: str, settled: Sequence[Settled],
                 config: TrajectoryConfig) -> tuple[tuple[MicroStepRef, ...], list[WriteBlob]]:
    members = [Member(one.execution, one.advantage, one.reading.tree, one.reading.targets, one.admission)
               for one in settled if one.admission is not None and one.admission.paths]
    references: list[MicroStepRef] = []
    blobs: list[WriteBlob] = []
    for number, chosen in enumerate(pack(members, config.budget)):
        step = micro_step(name, number, chosen, members)
        data = step.to_bytes()
        digest = bytes_digest(data)
        path = f"micro-steps/{name}/{digest}.msgpack"
        extent = Extent(step.num_tokens, step.num_pairs)
        references.append(MicroStepRef(
            step.micro_step, digest, config.budget.cost(extent), step.num_tokens, step.num_targets, len(step.executions),
            BlobRef(path, digest, len(data)), oversize=not config.budget.holds(extent)))
        blobs.append(WriteBlob(path, data))
    return tuple(references), blobs


def _outcome(one: Settled, dispatched: GroupDispatched) -> Outcome:
    terminated = one.state.terminated
    if terminated is None:
        raise ValueError(f"execution {one.execution} has not terminated")
    kind = one.standing.kind
    untrained = "eval" if dispatched.purpose == "eval" else "zero_advantage" if kind == "scored" else kind
    bare = Outcome(one.execution, kind, terminated.ending, one.standing.reward, one.advantage, terminated.num_calls, 0, 0,
                   reason=one.standing.reason)
    return one.reading.fill(bare, one.admission, untrained)
