"""The report's section on what the executions were made of: tokens, role classes, and groups that could teach."""

from collections import Counter
from collections.abc import Sequence

from gyre.cli.charts import stack
from gyre.cli.ledger import RunLedger
from gyre.cli.markup import Html, el, join, table
from gyre.contracts import events as e

_ORDER = ("main", "main-summary", "sub-agent", "sub-agent-summary")
_SIGNALS = {"compared": "whose rewards can be compared", "zero_variance": "whose rewards are all equal",
            "one_vote": "with a single vote", "no_votes": "without a vote"}


def trees_section(ledger: RunLedger) -> Html:
    """Targets by what became of them, role classes, and groups by whether they can teach; training groups only."""
    found = ledger.targets()
    groups = [c.fact for c in ledger.all(e.GroupCompleted).values() if c.fact.purpose == "train"]
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    if not found.num_targets:
        return Html("")
    tones = {"trained": "c2", "waiting": "grey"}
    others = iter(("soft", "c3", "move", "c1") * 4)
    parts = [(name, float(num), tones.get(name) or next(others)) for name, num in found.parts.items() if num]
    text = (f"Training executions sampled {found.num_sampled_tokens:,} tokens at {found.num_targets:,} distinct places "
            f"of their trees (targets). ")
    flat, unique = sum(o.num_flat_tokens for o in outcomes), sum(o.num_unique_tokens for o in outcomes)
    if unique:
        text += (f"Their calls hold {flat:,} tokens when each is written out and {unique:,} in the trees: sharing "
                 f"prefixes saves a factor of {flat / unique:.1f}.")
    return join((el("h2", "Tokens trained against sampled"), el("p", text),
                 stack("Targets, by what became of them", parts), _roles(outcomes), _groups(groups)))


def _roles(outcomes: Sequence[e.Outcome]) -> Html:
    """One row per role class that occurred."""
    rows = []
    for role in _ORDER:
        counts = [o.roles[role] for o in outcomes if role in o.roles]
        if counts:
            rows.append((role, f"{len(counts):,}", *(f"{sum(values):,}" for values in zip(*(
                (c.num_calls, c.num_sampled, c.num_paths, c.num_trained) for c in counts), strict=True))))
    if not rows:
        return Html("")
    unknown = sum(o.num_unknown_roots for o in outcomes)
    note = (f"Of {unknown:,} contexts nothing is known that says whose they are; they count as main." if unknown else
            "Of every context it is known whose it is.")
    head = ("role class", "executions", "calls", "tokens sampled", "paths trained", "targets they own")
    return join((el("h3", "Whose tokens they were"), table(head, rows, frozenset({1, 2, 3, 4, 5})), el("p", note, cls="mut")))


def _groups(groups: Sequence[e.GroupCompleted]) -> Html:
    """How many groups could teach; where all rewards are equal nothing can be learned from their difference."""
    by_signal = Counter(group.signal for group in groups)
    texts = [f"{num:,} {_SIGNALS[signal]}" for signal, num in by_signal.most_common()]
    return el("p", f"{len(groups):,} groups: {', '.join(texts)}.") if texts else Html("")
