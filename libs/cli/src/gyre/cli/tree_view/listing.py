"""The executions that have trees, one per line."""

from collections.abc import Sequence

from gyre.cli.tree_view.text import Say, grid
from gyre.cli.treefile import Header
from rich.text import Text

_SHORT = {"main": "main", "main-summary": "summary", "sub-agent": "sub", "sub-agent-summary": "sub-summary"}


def print_list(found: Sequence[tuple[str, Header | None]], width: int, say: Say) -> None:
    """Print id, task, kind, reward, advantage, calls, trained and sampled tokens, and calls by role class."""
    rows = [(name, *(_row(header) if header else ("cannot be read", *[""] * 7))) for name, header in found]
    if not rows:
        say(Text("no trees: one is written when all executions of its group have ended and are scored"))
        return
    headings = ("execution", "query", "kind", "ended", "reward", "advantage", "calls", "trained", "calls by role")
    for line in grid(headings, rows, {4, 5, 6, 7}, width, shrink=(8, 1)):
        say(line)


def _row(header: Header) -> tuple[str, ...]:
    outcome = header.outcome
    roles = ", ".join(f"{_SHORT.get(role, role)} {counts.num_calls}" for role, counts in outcome.roles.items())
    return (header.query, outcome.kind, outcome.ending, f"{outcome.reward:.3f}",
            f"{outcome.advantage:+.3f}" if header.purpose == "train" else header.purpose, f"{outcome.num_calls:,}",
            f"{outcome.num_trained_targets:,}/{outcome.num_targets:,}", roles)
