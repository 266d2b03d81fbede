"""One path of a tree as it is read from the root to a leaf, sampled parts marked."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
from gyre.cli.tree_view.anatomy import Anatomy, anatomy
from gyre.cli.tree_view.facts import count, versions_text, whose_text
from gyre.cli.tree_view.text import Options, Say
from gyre.cli.treefile import Decode, TreeView, spelled
from gyre.contracts.errors import ConfigError
from rich.text import Text

MAX_CONTEXT = 400  # tokens of one piece of context that are shown: a half from its beginning, a half from its end
MAX_SAMPLED = 4000


def print_path(view: TreeView, which: str, options: Options, say: Say) -> None:
    """Print an admitted path (`0`), the path to any segment (`leaf:12`), or that of a call (`call:7`) as a transcript.

    Raises:
        ConfigError: there is no such path; says which there are.
    """
    tree = anatomy(view)
    leaf, stop = find_path(view, which)
    segments = tree.path(leaf)
    say(Text(f"path {which}: {count(stop, 'token')}, segments {' '.join(map(str, segments[:12]))}"
             f"{' …' if len(segments) > 12 else ''}", "bold"))
    runs = [run for segment in segments for run in tree.runs_of(segment)]
    for (call, fate), same in groupby(runs, key=lambda run: (run.call, run.fate)):
        spans = [(run.start, min(run.stop, stop - int(view.depth[run.segment]) + int(view.bounds[run.segment])))
                 for run in same]
        spans = [(start, end) for start, end in spans if start < end]
        for line in _piece(tree, call, fate, spans, options) if spans else ():
            say(line)


def find_path(view: TreeView, which: str) -> tuple[int, int]:
    """(last segment, length in tokens) of a path. Raises ConfigError."""
    kind, _, number = which.rpartition(":")
    value = int(number) if number.isdecimal() else -1
    if kind == "" and 0 <= value < len(view.paths):
        value, kind = view.paths[value].leaf, "leaf"
    if kind == "leaf" and 0 <= value < len(view.parent):
        return value, int(view.depth[value] + view.bounds[value + 1] - view.bounds[value])
    call = next((c for c in view.calls if c.index == value), None) if kind == "call" else None
    if call is not None:
        return call.segment, call.length
    admitted = f"0 to {len(view.paths) - 1}" if view.paths else "none was admitted"
    raise ConfigError(f"--path: there is no path {which!r}; use the number of an admitted path ({admitted}), leaf:SEGMENT "
                      f"(0 to {len(view.parent) - 1}) or call:INDEX")


def _piece(tree: Anatomy, call: int, fate: str, spans: list[tuple[int, int]], options: Options) -> Iterator[Text]:
    places = np.concatenate([np.arange(*span) for span in spans])
    yield Text()
    if call < 0:
        yield Text(f"  context, {count(len(places), 'token')}", "dim")
    else:
        whose = tree.view.calls[call]
        versions = np.unique(tree.version[places]).tolist()
        yield Text(f"▌ #{whose.index} {whose_text([whose])}, {count(len(places), 'token')} sampled, "
                   f"{versions_text(versions)}, {fate}", "bold")
    if not tree.view.has_tokens:
        return
    mark, style, most = ("▌ ", "", MAX_SAMPLED) if call >= 0 else ("  ", "dim", MAX_CONTEXT)
    for line in clipped(tree.view.ids[places], most, options.decode).split("\n"):
        yield Text(mark + line, style)


def clipped(ids: np.ndarray, most: int, decode: Decode | None) -> str:
    """Ids as text; of more than `most` the middle is left out, with the number of tokens it has."""
    if len(ids) <= most:
        return spelled(ids.tolist(), decode)
    half = max(most // 2, 1)
    parts = (spelled(piece.tolist(), decode) for piece in (ids[:half], ids[-half:]))
    return f"\n… {len(ids) - 2 * half:,} tokens left out …\n".join(parts)
