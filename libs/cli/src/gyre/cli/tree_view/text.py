"""A tree on a terminal: head, roles, outline, and on demand every call, beginnings of texts, one path as a transcript.

Lines are `rich.text.Text`: coloured on a terminal, plain and of a fixed layout when piped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gyre.cli.tree_view.anatomy import Anatomy, Run, anatomy
from gyre.cli.tree_view.facts import (
    call_rows,
    count,
    fates_names,
    fates_text,
    head,
    numbers,
    role_rows,
    versions_text,
    weights,
    whose_text,
)
from gyre.cli.tree_view.outline import Row, Section, outline
from gyre.cli.treefile import Decode, TreeView, spelled
from rich.text import Text

Say = Callable[[Text], None]
MAX_RUNS = 6  # of one line whose text is shown
_GLYPHS = {"side": "├─", "fold": "├┄", "section": "├▶"}
_HEADINGS = ("", "tokens", "calls", "whose", "sampled", "path, or why not", "weights", "")
_NUMERIC = {4}
_SHRINK = (5, 3, 7, 2)  # columns that give way when a line is too long, first to last, and then the same again


@dataclass(frozen=True, slots=True)
class Options:
    """How a tree is printed.

    width: columns of a line; lines: lines the outline may take (0: never folded); calls: every call as a table;
    text: beginnings of what was read and sampled; decode: ids to text, None: ids are shown
    """

    width: int = 120
    lines: int = 80
    calls: bool = False
    text: bool = False
    decode: Decode | None = None


def print_tree(view: TreeView, options: Options, say: Say) -> None:
    """Print a tree line by line."""
    tree = anatomy(view)
    for line in (*_head(tree, options), *_outline(tree, options), *(_calls(tree, options) if options.calls else ())):
        say(line)


def _head(tree: Anatomy, options: Options) -> Iterator[Text]:
    for name, value in head(tree):
        for number, piece in enumerate(_wrapped(value, options.width - 13)):
            yield Text.assemble((f"{name if not number else '':<13}", "bold"), piece)
    yield Text()
    rows = [(r.role, f"{r.num_calls:,}", f"{r.num_sampled:,}", f"{r.num_paths:,}", f"{r.num_trained:,}")
            for r in role_rows(tree)]
    yield from grid(("role", "calls", "sampled", "paths", "trained"), rows, {1, 2, 3, 4}, options.width)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > max(width, 20):
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


# ---------------------------------------------------------------- outline


def _outline(tree: Anatomy, options: Options) -> Iterator[Text]:
    sections = outline(tree, options.lines)
    several = len(weights(tree)) > 1
    cells = [[_cells(tree, row, row is section.rows[-1], several) for row in section.rows] for section in sections]
    widths = _widths([_HEADINGS, *(line for block in cells for line in block)], options.width)
    for number, (section, block) in enumerate(zip(sections, cells, strict=True)):
        yield Text()
        yield _heading(tree, section, options.width)
        if number == 0:
            yield _line(_HEADINGS, widths, _NUMERIC, "dim")
        for row, line in zip(section.rows, block, strict=True):
            yield _line(line, widths, _NUMERIC, _style(row))
            if options.text:
                yield from _texts(tree, row, options)


def _heading(tree: Anatomy, section: Section, width: int) -> Text:
    return Text(_clipped(heading(tree, section), width), "bold")


def heading(tree: Anatomy, section: Section) -> str:
    """One line on a section."""
    branch = section.branch
    if branch is None:
        return "Roots that nothing hangs off"
    calls = [tree.view.calls[n] for n in section.calls]
    start, stop = tree.extent(branch)
    parts = [f"{count(stop - start, 'token')} to depth {stop:,}", count(len(calls), "call")]
    num = sum(row.num for row in section.rows if row.kind in ("side", "fold"))
    if num:
        parts.append(f"{num:,} side {'branch' if num == 1 else 'branches'}")
    if branch.fork >= 0:
        parts.append(f"hangs off at {start:,}")
    agents = {tree.view.calls[n].agent for n in branch.calls}  # others may hang off a prompt that they share
    return f"{section.name}  {whose_text([c for c in calls if c.agent in agents]) or 'shared context'}: {', '.join(parts)}"


def _cells(tree: Anatomy, row: Row, is_last: bool, several_weights: bool) -> tuple[str, ...]:
    calls = [tree.view.calls[n] for n in row.calls]
    whose = whose_text(calls) if row.kind != "trunk" or calls else "" if row.num_sampled else "context"
    return (glyph(row, is_last), f"{row.start:,}..{row.stop:,}", numbers([c.index for c in calls]), whose,
            f"{row.num_sampled:,}" if row.num_sampled else "", fates_names(row.fates),
            versions_text(row.versions) if several_weights else "", note(row))


def glyph(row: Row, is_last: bool) -> str:
    """The line's place in the graph; `is_last` of its section."""
    if row.kind == "trunk":
        return "●" if row.num_sampled else "○"
    return f"╰{_GLYPHS[row.kind][1:]}" if is_last else _GLYPHS[row.kind]


def note(row: Row) -> str:
    """What a line has to say beside its figures."""
    low, high = row.lengths
    if row.kind == "section":
        return f"see {row.name}, {row.label}" if row.label else f"see {row.name}"
    parts: list[str] = []
    if row.kind == "fold":
        kind = {"retry": "retries", "": "branches"}.get(row.label, f"× {row.label}")
        parts.append(f"{row.num:,} {kind} of {f'{low:,}' if low == high else f'{low:,}..{high:,}'}")
    elif row.label:
        parts.append(row.label)
    if row.kind == "side" and row.num > 1:
        parts.append(f"{row.num} branches")
    if row.leaf >= 0:
        parts.append(f"leaf {row.leaf}")
    if row.drawn > 1:
        parts.append(f"drawn {row.drawn}×")
    return ", ".join(parts)


def _style(row: Row) -> str:
    if row.kind == "section":
        return "cyan"
    if any(fate.startswith("path ") for fate in row.fates):
        return "green" if row.kind == "trunk" else ""
    return "" if row.kind == "trunk" and row.num_sampled else "dim"


def _texts(tree: Anatomy, row: Row, options: Options) -> Iterator[Text]:
    runs = [run for segment in row.segments for run in tree.runs_of(segment)] if row.kind != "section" else []
    for run in runs[:MAX_RUNS]:
        said = beginning(tree, run, options)
        yield Text.assemble("   ", (said, "" if run.call >= 0 else "dim"))
    if len(runs) > MAX_RUNS:
        yield Text(f"   and {len(runs) - MAX_RUNS} more pieces (see --path)", "dim")


def beginning(tree: Anatomy, run: Run, options: Options) -> str:
    """One line: how long a run is, whose, and how its text begins."""
    who = f"#{tree.view.calls[run.call].index}" if run.call >= 0 else "context"
    name = f"{who:<7} {run.num:>7,} │ "
    room = max(options.width - 3 - len(name), 20)
    if not tree.view.has_tokens:
        return f"{name}(ids are not here)"
    ids = tree.view.ids[run.start:min(run.stop, run.start + room)].tolist()
    return name + _clipped(" ".join(spelled(ids, options.decode).split()), room, run.num > len(ids))


# ---------------------------------------------------------------- calls


def _calls(tree: Anatomy, options: Options) -> Iterator[Text]:
    rows = [(f"#{r.index}", r.agent, r.role, r.known_by, "" if r.continues is None else f"#{r.continues}",
             f"{r.kept:,}" if r.kept else "", f"{r.prompt_len:,}", f"{r.num_output:,}", r.finish, versions_text(r.versions),
             fates_text(r.fates) if r.fates else "no output", f"{r.drawn}×" if r.drawn > 1 else "", str(r.segment))
            for r in call_rows(tree)]
    yield Text()
    yield from grid(("call", "agent", "role", "known by", "after", "keeps", "prompt", "output", "finish", "weights",
                     "path, or why not", "drawn", "segment"), rows, {5, 6, 7, 12}, options.width, shrink=(10, 2, 1))


# ---------------------------------------------------------------- layout


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], numeric: set[int], width: int,
         shrink: Sequence[int] = (0,)) -> Iterator[Text]:
    """A table of aligned columns with one line per row, at most `width` wide if `shrink`'s columns can give enough."""
    table = [tuple(row) for row in rows]
    widths = _widths([headings, *table], width, shrink)
    yield _line(headings, widths, numeric, "dim")
    for row in table:
        yield _line(row, widths, numeric, "")


def _widths(table: Sequence[Sequence[str]], width: int, shrink: Sequence[int] = _SHRINK) -> list[int]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for column, least in [(column, least) for least in (20, 8) for column in shrink]:
        over = sum(widths) + 2 * sum(w > 0 for w in widths) - 2 - width
        if over > 0:
            widths[column] = max(min(widths[column], least), widths[column] - over)
    return widths


def _line(row: Sequence[str], widths: Sequence[int], numeric: set[int], style: str) -> Text:
    cells = [_clipped(cell, width).rjust(width) if column in numeric else _clipped(cell, width).ljust(width)
             for column, (cell, width) in enumerate(zip(row, widths, strict=True)) if width]
    return Text("  ".join(cells).rstrip(), style)


def _clipped(text: str, width: int, is_cut: bool = False) -> str:
    if len(text) > width:
        return f"{text[:max(width - 1, 0)]}…"
    return f"{text}…" if is_cut and len(text) < width else text
