"""The end of a group: from the facts of its executions to outcomes, micro-steps and tree files.

A pure function of the group's contents: computed twice, it gives the same bytes, so that writing the blobs before the
fact may be repeated after a crash.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gyre.contracts.digest import bytes_digest
from gyre.contracts.events import BlobRef, GroupCompleted, GroupDispatched, MicroStepRef, Outcome
from gyre.runtime.effects import WriteBlob
from gyre.trajectory.admission import Admission, admit
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.group import Standing, group_advantages, standing
from gyre.trajectory.inspection import tree_file, tree_path
from gyre.trajectory.packing import Extent, Member, micro_step, pack
from gyre.trajectory.roles import RoleClassifier, leaf_roles
from gyre.trajectory.state import ExecutionState, GroupState
from gyre.trajectory.targets import Targets, find_targets
from gyre.trajectory.tree import Tree, build_tree


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """One execution that can no longer change. `admission` is None where nothing is trained."""

    execution: str
    state: ExecutionState
    standing: Standing
    tree: Tree
    targets: Targets
    advantage: float = 0.0
    admission: Admission | None = None


def complete(name: str, group: GroupState, config: TrajectoryConfig,
             roles: RoleClassifier) -> tuple[GroupCompleted, list[WriteBlob]]:
    """The fact that ends group `name`, and the blobs that must lie in the store before it may be seen."""
    dispatched = group.dispatched
    if dispatched is None or not group.complete:
        raise ValueError(f"group {name} is not complete")
    settled, mean, std = _settle(dispatched, group, config, roles)
    references, blobs = _micro_steps(name, settled, config)
    outcomes = tuple(_outcome(one, dispatched) for one in settled)
    for one, outcome in zip(settled, outcomes, strict=True):
        file = tree_file(outcome, dispatched, one.tree, one.targets, one.admission, roles.classify(one.tree.calls))
        blobs.append(WriteBlob(tree_path(one.execution), file.to_bytes()))
    num_scored = sum(one.standing.kind == "scored" for one in settled)
    fact = GroupCompleted(name, dispatched.burst, dispatched.query, dispatched.purpose, dispatched.version, outcomes,
                          num_scored, mean, std, references, dispatched.label)
    return fact, blobs


def _settle(dispatched: GroupDispatched, group: GroupState, config: TrajectoryConfig,
            roles: RoleClassifier) -> tuple[list[Settled], float, float]:
    members = list(group.members())
    standings = [standing(e.terminated, e.verdict, e.quarantine) for _, e in members if e.terminated is not None]
    advantages, stats = group_advantages(standings, config.advantage)
    settled: list[Settled] = []
    for (execution, state), its_standing, advantage in zip(members, standings, advantages, strict=True):
        tree = build_tree(state.log.ordered())
        targets = find_targets(tree, config.policy)
        trains = (dispatched.purpose == "train" and its_standing.kind == "scored" and len(targets) > 0
                  and (advantage != 0.0 or config.keep_zero_advantage))
        admission = _admit(execution, tree, targets, config, roles) if trains else None
        if dispatched.purpose == "eval":
            advantage = 0.0
        settled.append(Settled(execution, state, its_standing, tree, targets, advantage, admission))
    return settled, stats.mean, stats.std


def _admit(execution: str, tree: Tree, targets: Targets, config: TrajectoryConfig, roles: RoleClassifier) -> Admission:
    classes = leaf_roles(tree, roles.classify(tree.calls))
    return admit(tree, targets, classes, config.role_order, config.max_paths, (config.run, execution))


def _micro_steps(name: str, settled: Sequence[Settled],
                 config: TrajectoryConfig) -> tuple[tuple[MicroStepRef, ...], list[WriteBlob]]:
    members = [Member(one.execution, one.advantage, one.tree, one.targets, one.admission)
               for one in settled if one.admission is not None and one.admission.paths]
    references: list[MicroStepRef] = []
    blobs: list[WriteBlob] = []
    for number, chosen in enumerate(pack(members, config.budget)):
        step = micro_step(name, number, chosen, members)
        data = step.to_bytes()
        digest = bytes_digest(data)
        path = f"micro-steps/{name}/{digest}.msgpack"
        cost = config.budget.cost(Extent(step.num_tokens, step.num_pairs))
        references.append(MicroStepRef(step.micro_step, digest, cost, step.num_tokens, step.num_targets,
                                       len(step.executions), BlobRef(path, digest, len(data))))
        blobs.append(WriteBlob(path, data))
    return tuple(references), blobs


def _outcome(one: Settled, dispatched: GroupDispatched) -> Outcome:
    terminated = one.state.terminated
    if terminated is None:
        raise ValueError(f"execution {one.execution} has not terminated")
    trained = one.admission.num_owned if one.admission else 0
    return Outcome(one.execution, one.standing.kind, terminated.ending, one.standing.reward, one.advantage,
                   terminated.num_calls, len(one.targets), trained, _drops(one, dispatched), one.tree.num_tokens,
                   one.tree.num_flat_tokens, one.targets.num_drawn, one.standing.reason)


def _drops(one: Settled, dispatched: GroupDispatched) -> dict[str, int]:
    """Targets that are not trained, by reason; `unseen` and `no_context` count sampled positions that are no targets."""
    drops = dict(one.admission.drops) if one.admission else {}
    if one.admission is None and len(one.targets):
        kind = one.standing.kind
        reason = "eval" if dispatched.purpose == "eval" else "zero_advantage" if kind == "scored" else kind
        drops[reason] = len(one.targets)
    beside = {"unseen": one.targets.num_unseen, "no_context": one.targets.num_rootless}
    return drops | {reason: num for reason, num in beside.items() if num}
