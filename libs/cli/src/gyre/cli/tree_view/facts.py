"""What a tree comes to, as words and figures: shared by the terminal and the page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gyre.cli.tree_view.anatomy import Anatomy
from gyre.cli.treefile import Call

ROLES = ("main", "main-summary", "sub-agent", "sub-agent-summary")


@dataclass(frozen=True, slots=True)
class RoleRow:
    """What one role class had: calls, sampled tokens of the policy, admitted paths, targets they own."""

    role: str
    num_calls: int
    num_sampled: int
    num_paths: int
    num_trained: int


@dataclass(frozen=True, slots=True)
class CallRow:
    """One call as a line of a table. `continues`: index of the call it goes on from, keeping `kept` tokens of it."""

    index: int
    agent: str
    role: str
    known_by: str
    continues: int | None
    kept: int
    prompt_len: int
    num_output: int
    finish: str
    versions: tuple[int, ...]
    fates: dict[str, int]
    drawn: int
    segment: int


def head(tree: Anatomy) -> list[tuple[str, str]]:
    """(name, value) of everything that is said of the whole tree."""
    view = tree.view
    num_flat = sum(call.length for call in view.calls)
    ratio = f", {num_flat / view.num_tokens:,.1f} times as many" if view.num_tokens else ""
    leaves = len(tree.branches)
    shape = (f"{view.num_tokens:,} unique of {num_flat:,} that the calls hold written out{ratio}",
             f"{count(leaves, 'path')}, {count(len(tree.roots), 'root')}, "
             f"deepest {max((tree.extent(b)[1] for b in tree.branches), default=0):,}")
    rows = [("calls", _calls(tree)), ("tokens", "; ".join(shape)), ("outputs", _outputs(tree)),
            *_untrained(tree), ("weights", _weights(tree))]
    if view.header is not None:
        rows = [*_whose(tree), *rows]
    if not view.has_tokens:
        rows.append(("left out", "the token ids: the tree is too long for an answer of the service, and is not in the blob "
                                 "store before its group is complete; text and log-probs are not shown"))
    return [(name, value) for name, value in rows if value]


def _whose(tree: Anatomy) -> list[tuple[str, str]]:
    header = tree.view.header
    assert header is not None
    outcome = header.outcome
    if outcome.reason.startswith("open:"):
        waits = outcome.reason.removeprefix("open:").strip()
        became = "open: " + ("it waits for others of its group" if waits == "settled" else f"it waits for {waits}")
    else:
        became = f"{outcome.kind}, reward {outcome.reward:.3f}, advantage {outcome.advantage:+.3f}; harness {outcome.ending}"
        became += f"; {outcome.reason}" if outcome.reason else ""
    return [("execution", f"{outcome.execution}  (query {header.query}, group {header.group}, {header.purpose})"),
            ("outcome", became), ("imported", header.source)]


def _calls(tree: Anatomy) -> str:
    outcome = tree.view.header.outcome if tree.view.header else None
    num, said = len(tree.view.calls), outcome.num_calls if outcome else len(tree.view.calls)
    agents = len({call.agent for call in tree.view.calls})
    parts = [f"{num:,}" if said == num else f"{num:,} of {said:,} on record", f"of {count(agents, 'agent')}"]
    unknown = outcome.num_unknown_roots if outcome else 0
    if unknown:
        parts.append(f"{count(unknown, 'context')} of unknown role, taken as main")
    return ", ".join(parts)


def _outputs(tree: Anatomy) -> str:
    """Tokens drawn, places at which they are targets, and how many are trained."""
    targets, trained = int(tree.is_target.sum()), sum(path.num_owned for path in tree.view.paths)
    outcome = tree.view.header.outcome if tree.view.header else None
    drawn = f"{outcome.num_sampled_tokens:,} drawn at " if outcome else ""
    paths = f"{trained:,} trained on {count(len(tree.view.paths), 'path')}" if tree.view.paths else "none trained"
    return f"{drawn}{count(targets, 'target')}, {paths}"


def _untrained(tree: Anatomy) -> list[tuple[str, str]]:
    """Targets that are not trained, and sampled tokens that are none, by reason."""
    if tree.view.header is None:
        return []
    outcome = tree.view.header.outcome
    return [(name, ", ".join(f"{num:,} {reason}" for reason, num in sorted(found.items(), key=lambda item: -item[1])))
            for name, found in (("not trained", outcome.drops), ("no targets", outcome.not_targets))]


def _weights(tree: Anatomy) -> str:
    return ", ".join(f"v{version}: {count(num, 'token')}" for version, num in weights(tree))


def weights(tree: Anatomy) -> list[tuple[int, int]]:
    """(weights version, sampled tokens) of what the policy sampled."""
    versions, counts = np.unique(tree.version[tree.is_target], return_counts=True)
    return list(zip(versions.tolist(), counts.tolist(), strict=True))


def role_rows(tree: Anatomy) -> list[RoleRow]:
    """One row for every role class that occurs."""
    rows: dict[str, list[int]] = {}
    for call in tree.view.calls:
        row = rows.setdefault(call.role_class, [0, 0, 0, 0])
        row[0] += 1
        row[1] += call.length - call.prompt_len if call.excluded != "model" else 0
    for path in tree.view.paths:
        row = rows.setdefault(path.role_class, [0, 0, 0, 0])
        row[2] += 1
        row[3] += path.num_owned
    known = [role for role in ROLES if role in rows]
    return [RoleRow(role, *rows[role]) for role in (*known, *sorted(set(rows) - set(known)))]


def call_rows(tree: Anatomy) -> list[CallRow]:
    """One row per call, in order."""
    view = tree.view
    indices = {call.call: call.index for call in view.calls}
    drawn: dict[tuple[int, int, int], int] = {}
    for call in view.calls:
        drawn[_output_of(call)] = drawn.get(_output_of(call), 0) + 1
    return [CallRow(call.index, call.agent, call.role_class, call.known_by, indices.get(call.base_call or ""), call.keep_len,
                    call.prompt_len, call.length - call.prompt_len, call.finish_reason,
                    tuple(sorted({s.version for s in call.spans})), fates(tree, call), drawn[_output_of(call)], call.segment)
            for call in sorted(view.calls, key=lambda c: c.index)]


def _output_of(call: Call) -> tuple[int, int, int]:
    return call.segment, call.prompt_len, call.length


def fates(tree: Anatomy, call: Call) -> dict[str, int]:
    """Tokens of a call's output by what became of them."""
    found: dict[str, int] = {}
    for segment, low, high in tree.view.spans(call.segment, call.prompt_len, call.length):
        for run in tree.runs_of(segment):
            num = min(high, run.stop) - max(low, run.start)
            if num > 0:
                found[run.fate] = found.get(run.fate, 0) + num
    return found


# ---------------------------------------------------------------- words


def count(num: int, noun: str) -> str:
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def numbers(indices: Sequence[int]) -> str:
    """Indices of calls, briefly: `#4`, `#4 #7`, `#4..#9`, `#4..#19 (8)` where others lie between."""
    if not indices:
        return "–"
    first, last = indices[0], indices[-1]
    if len(indices) <= 2:
        return " ".join(f"#{i}" for i in indices)
    return f"#{first}..#{last}" + ("" if last - first + 1 == len(indices) else f" ({len(indices)})")


def versions_text(versions: Sequence[int]) -> str:
    if not versions:
        return ""
    return f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]}..v{versions[-1]}"


def fates_text(fates: dict[str, int]) -> str:
    """What became of sampled tokens: `path 0`, or with figures `path 0: 120, max_paths: 30`."""
    if len(fates) == 1:
        return next(iter(fates))
    return ", ".join(f"{fate}: {num:,}" for fate, num in _most_first(fates))


def fates_names(fates: dict[str, int]) -> str:
    """The same without figures: `path 0 + max_paths`; of many paths only how many."""
    names = [fate for fate, _ in _most_first(fates)]
    paths = [fate for fate in names if fate.startswith("path ")]
    if len(paths) > 2:
        names = [f"{len(paths)} paths", *(fate for fate in names if fate not in paths)]
    return " + ".join(names)


def _most_first(fates: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(fates.items(), key=lambda item: (-item[1], item[0]))


def whose_text(calls: Sequence[Call]) -> str:
    """Agents and role classes of calls, briefly: `main`, `main + summary`, `sub-4`, `3 sub-agents`, `4 agents`."""
    roles = [role for role in ROLES if any(call.role_class == role for call in calls)]
    agents = list(dict.fromkeys(call.agent or call.lineage for call in calls))
    if not calls:
        return ""
    kinds = dict.fromkeys(role.removesuffix("-summary") for role in roles)
    who = agents[0] if len(agents) == 1 else f"{len(agents)} {f'{next(iter(kinds))}s' if len(kinds) == 1 else 'agents'}"
    plain = [role for role in roles if not role.endswith("-summary")]
    if len(plain) == len(roles):
        return who
    return f"{who} + summary" if plain else f"{who} summary"
