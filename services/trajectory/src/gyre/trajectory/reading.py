"""What the records of one execution amount to: its tree, the role of every call, its targets."""

from dataclasses import dataclass

from gyre.contracts.events import Outcome, RoleClass, RoleCounts
from gyre.trajectory.admission import Admission
from gyre.trajectory.record import Call
from gyre.trajectory.roles import CallRole, RoleClassifier, leaf_roles
from gyre.trajectory.targets import Eligibility, Targets, find_targets
from gyre.trajectory.tree import Tree, build_tree


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One execution's records, read. `roles` has one entry per call, in the order of `tree.calls`."""

    tree: Tree
    roles: tuple[CallRole, ...]
    targets: Targets

    def leaf_roles(self) -> dict[int, RoleClass]:
        """Leaf segment -> role class of its path."""
        return leaf_roles(self.tree, self.roles)

    @property
    def num_unknown_roots(self) -> int:
        """Contexts nothing is known of; they are taken as the main agent's."""
        return sum(role.known_by == "unknown" for role in self.roles)

    def role_counts(self, admission: Admission | None) -> dict[RoleClass, RoleCounts]:
        """What each role class that occurs had: calls, sampled tokens, admitted paths and the targets they own."""
        counts: dict[RoleClass, list[int]] = {}
        for call, role, excluded in zip(self.tree.calls, self.roles, self.targets.excluded, strict=True):
            row = counts.setdefault(role.role_class, [0, 0, 0, 0])
            row[0] += 1
            row[1] += len(call.record.output_ids) if excluded != "model" else 0
        for path in admission.paths if admission else ():
            row = counts.setdefault(path.role_class, [0, 0, 0, 0])
            row[2] += 1
            row[3] += path.num_owned
        return {role: RoleCounts(*row) for role, row in counts.items()}

    def drops(self, admission: Admission | None, untrained: str) -> dict[str, int]:
        """Targets that are not trained, by reason; `untrained` is the reason if nothing was admitted."""
        if admission is not None:
            return admission.drops
        return {untrained: len(self.targets)} if len(self.targets) else {}

    def not_targets(self) -> dict[str, int]:
        """Sampled positions that are no targets, by reason; `no_context`: the first token of a root."""
        rootless = {"no_context": self.targets.num_rootless} if self.targets.num_rootless else {}
        return self.targets.num_without | rootless

    def fill(self, outcome: Outcome, admission: Admission | None, untrained: str) -> Outcome:
        """`outcome` with everything that follows from the records."""
        return Outcome(
            outcome.execution, outcome.kind, outcome.ending, outcome.reward, outcome.advantage, outcome.num_calls,
            len(self.targets), admission.num_owned if admission else 0, self.drops(admission, untrained),
            self.tree.num_tokens, self.tree.num_flat_tokens, self.targets.num_drawn, outcome.reason,
            self.role_counts(admission), self.num_unknown_roots, self.not_targets())


def read_execution(calls: tuple[Call, ...], eligibility: Eligibility, classifier: RoleClassifier) -> Reading:
    """Read `calls`, which stand in gateway order."""
    tree = build_tree(calls)
    return Reading(tree, classifier.classify(calls), find_targets(tree, eligibility))
