"""Which run's traces are looked at, and which transitions of it."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.cli.run_dir import find_running, open_existing
from gyre.cli.trace_view.tree import Transition
from gyre.contracts.errors import ConfigError
from gyre.runtime.config import load_deployment
from gyre.runtime.telemetry import TRACES

MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of span files, and what it is."""

    directory: Path
    said: str


def find_place(run: str, runs: Path) -> Place:
    """The span files of `run`: a run's directory, its name below `runs`, or a directory of span files.

    Empty: the run that is up, else the newest below `runs`. Raises ConfigError if there is none.
    """
    if not run:
        return _default(runs)
    for path in (Path(run), runs / run):
        if (path / "run.toml").exists():
            return Place(_traces_of(path), f"run {path.resolve().name}")
        if path.is_dir() and any(path.glob("*.jsonl")):
            return Place(path, f"span files of {path}")
    near = difflib.get_close_matches(run, [path.parent.name for path in runs.glob("*/run.toml")], 3, 0.4)
    raise ConfigError(f"{run}: no run there and none of that name under {runs}"
                      + (f"; nearest: {', '.join(near)}" if near else ""))


def _default(runs: Path) -> Place:
    up = find_running(runs)
    if up is not None:
        return Place(_traces_of(up.path), f"run {up.name} (is up)")
    made = sorted(runs.glob("*/run.toml"), key=lambda path: path.stat().st_mtime)
    if not made:
        raise ConfigError(f"no run under {runs}; name one: gyre trace RUN")
    return Place(_traces_of(made[-1].parent), f"run {made[-1].parent.name} (the newest under {runs})")


def _traces_of(path: Path) -> Path:
    run = open_existing(path)
    logs = Path(load_deployment(run.deployment).log_dir) if run.deployment.exists() else run.logs
    return logs / TRACES


def choose(found: Sequence[Transition], name: str, place: Place) -> Transition:
    """The transition of that id, the newest if none is named. Raises ConfigError, naming those that are near."""
    if not found:
        raise ConfigError(f"{place.said}: no trace of a role transition in its files; no cell has changed its role yet, or an "
                          "earlier version wrote them")
    if not name:
        return found[-1]
    for one in found:
        if one.name == name:
            return one
    names = [one.name for one in found]
    near = difflib.get_close_matches(name, names, MAX_NAMED, 0.6) or names[-MAX_NAMED:]
    raise ConfigError(f"{name}: no such transition in {place.said}; nearest: {', '.join(near)}")
