"""The report's sections on single executions: a held-out task before and after, and one that a limit ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gyre.cli.cases import BeforeAfter, diff, workspace_of_snapshot, workspace_of_task
from gyre.cli.markup import Html, el, join, table
from gyre.cli.tree_view.anatomy import anatomy
from gyre.cli.tree_view.drawing import drawing, legend
from gyre.cli.tree_view.outline_html import outline_html
from gyre.cli.treefile import Decode, TreeView, read_tree, spelled, turns
from gyre.cli.views import Execution
from gyre.contracts.errors import BrokenBody
from gyre.policy.tokenizer import TOKENIZER_FILE, ChatTokenizer
from gyre.runtime.blobs import BlobStore, open_blobs
from gyre.runtime.config import RunConfig, load_deployment

MAX_TURNS = 60
MAX_LINES = 60


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the text of single executions comes from; what is absent is said to be absent."""

    blobs: BlobStore | None
    tasks_root: Path
    decode: Decode | None
    stop_ids: frozenset[int]

    @classmethod
    def open(cls, run_dir: Path, config: RunConfig) -> Sources:
        """Blob store by the run's deployment file, tasks and tokenizer by its configuration."""
        deployment = run_dir / "deployment.toml"
        blobs = open_blobs(load_deployment(deployment).blobs) if deployment.exists() else None
        tasks, checkpoint = Path(config.tasks.root), Path(config.policy.checkpoint)
        if not (checkpoint / TOKENIZER_FILE).exists():
            return cls(blobs, tasks, None, frozenset())
        tokenizer = ChatTokenizer.load(checkpoint)
        return cls(blobs, tasks, tokenizer.decode, frozenset(tokenizer.stop_ids))

    def tree(self, execution: str) -> TreeView | str:
        """The execution's tree, or why there is none to show."""
        if self.blobs is None:
            return "The run has no blob store any more, so its tree is not shown."
        try:
            return read_tree(self.blobs, execution)
        except FileNotFoundError:
            return f"The blob store has no tree of {execution}."
        except BrokenBody as error:
            return f"The tree of {execution} cannot be read: {error}"

    def changes(self, x: Execution) -> list[str] | str:
        """The diff of the execution's workspace, or why there is none to show."""
        snapshot = x.terminated.fact.snapshot if x.terminated else None
        if snapshot is None:
            return "No workspace was preserved."
        task = self.tasks_root / x.task
        if self.blobs is None or not x.task or not task.is_dir():
            return "The blob store or the task is not there any more, so the workspace is not shown."
        try:
            after = workspace_of_snapshot(self.blobs, snapshot)
        except BrokenBody as error:
            return str(error)
        return diff(workspace_of_task(task), after) or "Nothing was changed in the workspace."

    def text(self, ids: tuple[int, ...]) -> str:
        return spelled(ids, self.decode, self.stop_ids)


# ---------------------------------------------------------------- held-out, before and after


def held_out_case(case: BeforeAfter | None, sources: Sources) -> Html:
    """Both transcripts side by side."""
    if case is None:
        return Html("")
    sides = [el("div", el("h3", f"{name} · reward {_reward(x)}"), _transcript(x, sources))
             for name, x in (("Before training", case.before), ("After training", case.after))]
    return join((el("h2", "One held-out task, before and after"),
                 el("p", f"Task {case.task}, chosen by rule: its gain is the median of all held-out tasks. What the "
                         "policy sampled is marked; the rest is what the harness put into its context. A heavy line "
                         "is a new context."),
                 el("div", *sides, cls="pair")))


def _reward(x: Execution) -> str:
    if x.scored is None:
        return "none"
    checks = f" ({x.scored.num_passed} of {x.scored.num_checks} checks)" if x.scored.num_checks else ""
    return f"{x.scored.reward:.3f}{checks}"


def _transcript(x: Execution, sources: Sources) -> Html:
    tree = sources.tree(x.execution)
    if isinstance(tree, str):
        return el("p", tree, cls="mut")
    shown = list(turns(tree))
    rows = []
    for turn in shown[:MAX_TURNS]:
        said = (f"{sources.text(turn.added)}\n" if turn.added else "", el("mark", sources.text(turn.output) or "∅"))
        rows.append(el("div", el("span", f"#{turn.call.index}", cls="no"), el("div", *said, cls="said"),
                       cls="turn fresh" if turn.is_fresh and turn is not shown[0] else "turn"))
    left = len(shown) - MAX_TURNS
    return join((*rows, el("p", f"and {left} more calls", cls="mut") if left > 0 else None))


# ---------------------------------------------------------------- ended by a limit


def timed_out_case(x: Execution | None, sources: Sources) -> Html:
    """The limit, the workspace it left, its score, its tree and what of it was trained."""
    if x is None or x.terminated is None:
        return Html("")
    tree = sources.tree(x.execution)
    parts = [el("h2", "One execution that a limit ended"),
             el("p", f"Execution {x.execution} on task {x.task or 'unknown'}. A harness that runs out of time is not "
                     "thrown away: its workspace is preserved as it stood, scored like any other, and what it "
                     "sampled is trained."), _fate(x), el("h3", "What it had changed in its workspace"),
             _diff(sources.changes(x)), el("h3", "Its trajectory tree")]
    parts += [el("p", tree, cls="mut")] if isinstance(tree, str) else [_tree(tree, sources)]
    return join(parts)


def _fate(x: Execution) -> Html:
    assert x.terminated is not None
    fact, outcome = x.terminated.fact, x.outcome
    rows = [("limit that fired", _limit(x)), ("time in the harness", f"{fact.wall_s:.2f} s"),
            ("calls answered and recorded", str(fact.num_calls)), ("score of what it left", _reward(x))]
    if outcome is not None:
        dropped = "".join(f", {num} not ({reason})" for reason, num in sorted(outcome.drops.items()))
        rows += [("advantage in its group", f"{outcome.advantage:+.3f}"),
                 ("targets", f"{outcome.num_trained_targets} of {outcome.num_targets} trained{dropped}"),
                 ("tokens", f"{outcome.num_unique_tokens} in its tree, {outcome.num_flat_tokens} written out by call")]
    return table(("", ""), rows)


def _limit(x: Execution) -> str:
    limit = x.terminated.fact.limit if x.terminated else ""
    if limit == "calls" and x.spec is not None and x.spec.timeout_calls is not None:
        return f"calls: killed while it waited for call {x.spec.timeout_calls}"
    if limit == "harness_timeout" and x.spec is not None:
        return f"harness timeout of {x.spec.timeout_s:g} s"
    return limit or "not named"


def _diff(changes: list[str] | str) -> Html:
    if isinstance(changes, str):
        return el("p", changes, cls="mut")
    kinds = {"+": "add", "-": "del", "@": "at"}
    lines = [el("span", line or " ", cls="at" if line.startswith(("---", "+++")) else kinds.get(line[:1]))
             for line in changes]
    return el("pre", *lines, cls="diff")


def _tree(view: TreeView, sources: Sources) -> Html:
    """Its drawing, and its outline with texts; `gyre tree` shows more of it."""
    tree = anatomy(view)
    trained = ("Colours of texts say which admitted path trains them." if view.paths
               else "No path of it was admitted to training.")
    return join((legend(tree), el("div", drawing(tree), cls="draw"), el("p", trained, cls="mut"),
                 outline_html(tree, MAX_LINES, sources.text)))
