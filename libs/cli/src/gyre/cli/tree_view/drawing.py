"""A tree as inline SVG: depth in tokens from left to right, one lane for each branch that needs one.

A trunk keeps its lane; what hangs off it lies below, and branches that do not overlap share a lane. Context is a thin
line, what was sampled a bar in the colour of its role class: solid where an admitted path owns it, hollow where it is
not trained. Colours are CSS classes of the page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gyre.cli.charts import axis
from gyre.cli.markup import Html, el, join
from gyre.cli.tree_view.anatomy import Anatomy, Branch, Run
from gyre.cli.tree_view.facts import count

WIDTH = 1000.0  # units of the drawing; the page stretches it
TOP = 18.0
LEAST = 2.0  # width of a bar that would be too thin to be seen
GAP = 4.0  # units between two branches on one lane
ROLE_CLASSES = {"main": "r0", "main-summary": "r1", "sub-agent": "r2", "sub-agent-summary": "r3"}


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lane of every branch, and how many there are."""

    of: tuple[int, ...]
    num: int


def drawing(tree: Anatomy) -> Html:
    """The whole tree as one SVG; `data-call` on a bar is the number of the call that sampled it."""
    deepest = max((tree.extent(b)[1] for b in tree.branches), default=0)
    if not deepest:
        return el("p", "The tree has no tokens.", cls="mut")
    scale = WIDTH / deepest
    lanes = lanes_of(tree, scale)
    height = lane_height(lanes.num)
    bottom = TOP + lanes.num * height + 4
    marks = [mark for branch in tree.branches for mark in _branch(tree, branch, lanes, height, scale)]
    ticks = [tick for tick in axis(0, deepest, 8).ticks if tick <= deepest]
    grid = [join((el("line", x1=_at(t, scale), x2=_at(t, scale), y1=TOP - 4, y2=f"{bottom:.0f}", cls="grid"),
                  el("text", f"{t:,.0f}", x=_at(t, scale), y=TOP - 7, text_anchor="middle" if 0 < t < 0.97 * deepest else
                     "end" if t else "start"))) for t in ticks]
    return el("svg", el("title", f"{count(len(tree.branches), 'path')}, {deepest:,} tokens deep"), *grid, *marks,
              cls="lanes", viewBox=f"-4 0 {WIDTH + 8:.0f} {bottom:.0f}", role="img")


def lane_height(num: int) -> float:
    """Units per lane: many lanes are thin."""
    return 16.0 if num <= 30 else 11.0 if num <= 80 else 7.0


def lanes_of(tree: Anatomy, scale: float) -> Lanes:
    """Lanes, packed: a branch with all that hangs off it takes the first lanes below its fork that are free there."""
    blocks: list[tuple[dict[int, int], float]] = [({}, 0.0)] * len(tree.branches)  # lanes inside the block, its right end
    for branch in reversed(tree.branches):  # what hangs off a branch stands behind it
        start, stop = (edge * scale for edge in tree.extent(branch))
        inside, right = {branch.number: 0}, max(stop, start + LEAST)
        placed, reach = _packed(tree, [tree.branches[n] for n in branch.sides], blocks, scale)
        blocks[branch.number] = inside | {n: 1 + lane for n, lane in placed.items()}, max(right, reach)
    placed, _ = _packed(tree, sorted(tree.roots, key=lambda b: b.first_call), blocks, scale)
    return Lanes(tuple(placed[n] for n in range(len(tree.branches))), 1 + max(placed.values(), default=-1))


def _packed(tree: Anatomy, sides: Sequence[Branch], blocks: Sequence[tuple[dict[int, int], float]],
            scale: float) -> tuple[dict[int, int], float]:
    """Lane of everything in the blocks of `sides`, and their right end. Blocks come in order of where they begin."""
    free: list[float] = []  # from where on each lane is free
    placed: dict[int, int] = {}
    reach = 0.0
    for side in sides:
        inside, right = blocks[side.number]
        start, num = tree.extent(side)[0] * scale, 1 + max(inside.values())
        first = 0
        while any(end > start for end in free[first:first + num]):
            first += 1
        free += [0.0] * (first + num - len(free))
        free[first:first + num] = [right + GAP] * num
        placed |= {number: first + lane for number, lane in inside.items()}
        reach = max(reach, right)
    return placed, reach


def _branch(tree: Anatomy, branch: Branch, lanes: Lanes, height: float, scale: float) -> Iterator[Html]:
    start, stop = tree.extent(branch)
    middle = _middle(lanes.of[branch.number], height)
    if branch.fork >= 0:
        above = _middle(lanes.of[branch.parent], height)
        yield el("path", d=f"M{start * scale:.1f} {above:.1f}V{middle:.1f}", cls="fork")
    yield el("path", d=f"M{start * scale:.1f} {middle:.1f}H{max(stop * scale, start * scale + LEAST):.1f}", cls="ctx")
    for segment in branch.segments:
        shift = int(tree.view.depth[segment]) - int(tree.view.bounds[segment])
        for run in tree.runs_of(segment):
            if run.call >= 0:
                yield _bar(tree, run, shift, middle, height, scale)


def _bar(tree: Anatomy, run: Run, shift: int, middle: float, height: float, scale: float) -> Html:
    role = ROLE_CLASSES.get(tree.view.calls[run.call].role_class, "r0")
    kind = "own" if run.fate.startswith("path ") else "drop"
    thick = min(height - 3, 10.0)
    return el("rect", x=f"{(run.start + shift) * scale:.1f}", y=f"{middle - thick / 2:.1f}",
              width=f"{max(run.num * scale, LEAST):.1f}", height=f"{thick:g}", cls=f"{role} {kind}", data_call=run.call)


def _middle(lane: int, height: float) -> float:
    return TOP + (lane + 0.5) * height


def _at(depth: float, scale: float) -> str:
    return f"{depth * scale:.1f}"


def legend(tree: Anatomy) -> Html:
    """What the colours and shapes say."""
    present = {call.role_class for call in tree.view.calls}
    keys = [el("span", el("i", cls=f"key {name}"), role) for role, name in ROLE_CLASSES.items() if role in present]
    return el("p", *keys, el("span", el("i", cls="key solid"), "solid: an admitted path trains it"),
              el("span", el("i", cls="key hollow"), "hollow: sampled, not trained"),
              el("span", el("i", cls="key thin"), "line: context"), cls="legend")
