"""`gyre simulate`: what would another schedule, burst or number of cells cost? The options, and what is printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from gyre.contracts.errors import ConfigError, GyreError
from rich.console import Console

if TYPE_CHECKING:
    from gyre.cli.recorded import Recording
    from gyre.cli.simulation import Line
    from gyre.contracts.simulation import Simulated, SimulationRequest
    from gyre.runtime.config import RunConfig

console = Console(highlight=False, soft_wrap=True)

ConfigPath = Annotated[Path | None, typer.Argument(help="the run's configuration (TOML), as `gyre train` takes it; with --from "
                                                        "that run's own is the default")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="override, e.g. --set burst.steps_per_burst=4")]
Constants = Annotated[Path | None, typer.Option("--constants", help="what is assumed of engines, trainer and transitions "
                                                                    "(TOML; the scheduler's README has its fields)")]
WorkloadName = Annotated[str, typer.Option("--workload", help="lognormal; or a file: a table of executions or sessions a line")]
FromRun = Annotated[Path | None, typer.Option("--from", help="a run's directory: its executions, costs and transitions")]
Cells = Annotated[int, typer.Option("--cells", help="K: that many cells in all, instead of the configured ones", min=0)]
Schedules = Annotated[list[str] | None, typer.Option("--schedule", help="may be repeated; default: the configured one and "
                                                                        "elastic, async+streaming, colocate")]
Sweep = Annotated[bool, typer.Option("--sweep", help="every burst of the configured mean staleness, every division of the "
                                                     "cells; best against best")]
Seeds = Annotated[int, typer.Option("--seeds", help="seeds; equal for all schedules", min=1)]
Picture = Annotated[Path | None, typer.Option("--picture", help="write the timelines of the first seed as one HTML page")]


def simulate(config: ConfigPath = None, sets: Sets = None, constants: Constants = None, workload: WorkloadName = "lognormal",
             from_run: FromRun = None, num_cells: Cells = 0, schedules: Schedules = None, sweep: Sweep = False,
             seeds: Seeds = 3, picture: Picture = None) -> None:
    """Simulate a run under several schedules, on the scheduler's own core; starts nothing and trains nothing."""
    from gyre.cli.simulation import best_lines, collect, lines_of

    try:
        if picture is not None and (picture.is_dir() or not picture.parent.is_dir()):
            raise ConfigError(f"--picture {picture}: give a file in a directory that is there")
        request, loaded, recording = _request(config, sets, constants, workload, from_run, num_cells, schedules, sweep, seeds,
                                              picture is not None)
        with console.status("") as status:
            runs = collect(request, lambda num, run: status.update(f"{num} runs: {run.schedule}"))
        found = lines_of(runs)
        notes = _notes(loaded, request, recording, runs)
        _print(found, notes)
        if sweep:
            _print(best_lines(runs), ["", "best against best"])
        if picture is not None:
            _draw(best_lines(runs) if sweep else found, loaded, notes, picture)
    except GyreError as error:
        console.print(f"gyre: {error}", markup=False, style="red")
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


def _request(config: Path | None, sets: list[str] | None, constants: Path | None, workload: str, from_run: Path | None,
             num_cells: int, schedules: list[str] | None, sweep: bool, seeds: int,
             with_lanes: bool) -> tuple[SimulationRequest, RunConfig, Recording | None]:
    from gyre.cli.recorded import Room, read_recording
    from gyre.cli.simulation import merged_constants, workload_rows
    from gyre.contracts.simulation import SimulationRequest
    from gyre.runtime.config import load_run
    from gyre.runtime.settings import to_toml

    path = config or (from_run / "run.toml" if from_run else None)
    if path is None:
        raise ConfigError("name a configuration or a recorded run: gyre simulate CONFIG.toml, gyre simulate --from runs/NAME")
    if from_run and workload != "lognormal":
        raise ConfigError(f"--workload {workload}: --from brings its own executions; leave one of them out")
    loaded = load_run(path, sets)
    if num_cells:
        loaded = replace(loaded, cells=replace(loaded.cells, count=num_cells, standalone=0, training=0))
    room = Room(loaded.cells.executions_per_cell or loaded.engine.max_running, loaded.harness.max_concurrent)
    recording = read_recording(from_run, room) if from_run else None
    rows = recording.rows if recording else workload_rows(workload)
    measured = recording.constants if recording else {}
    wanted = tuple(dict.fromkeys(schedules or _default_schedules(loaded, sweep)))
    return SimulationRequest(to_toml(loaded), wanted, merged_constants(constants, measured), rows, loaded.seed, seeds, sweep,
                             with_lanes), loaded, recording


def _default_schedules(config: RunConfig, sweep: bool) -> list[str]:
    others = ["elastic", "async+streaming"] + (["colocate"] if sweep or not config.burst.phi else [])
    return [config.cells.schedule, *(name for name in others if config.cells.count > 1 or not name.startswith("async"))]


def _notes(config: RunConfig, request: SimulationRequest, recording: Recording | None, runs: list[Simulated]) -> list[str]:
    from gyre.cli.charts import duration

    burst, cells = config.burst, config.cells
    source = request.rows.source or "a table" if request.rows else "a lognormal distribution"
    slots, last_seed = cells.executions_per_cell or config.engine.max_running, request.first_seed + request.num_seeds - 1
    notes = [f"{config.name}: {config.steps} steps of {burst.groups_per_step} groups of {burst.executions_per_group} "
             f"executions, {cells.count + cells.standalone} cells for {slots} executions each; durations from {source}; "
             f"seeds {request.first_seed} to {last_seed}"]
    num_cut = sum(r.num_cut for r in runs)
    if num_cut:
        total = sum(r.num_executions for r in runs)
        notes.append(f"{num_cut:,} of {total:,} executions are ended at harness.timeout_s = {config.harness.timeout_s:g} s")
    if recording is not None and recording.num_steps:
        own = [r for r in runs if (r.schedule, r.steps_per_burst, r.phi) == (cells.schedule, burst.steps_per_burst, burst.phi)]
        said = f"; simulated under its own schedule {duration(own[0].steps[-1].finished_s / len(own[0].steps))}" if own else ""
        notes.append(f"the recorded run took {duration(recording.makespan_s / recording.num_steps)} per step{said}")
    return notes


def _print(lines: list[Line], notes: list[str]) -> None:
    from gyre.cli.simulation import EXPLAINED, HEADS, LEFT, cells

    for note in notes:
        console.print(note, markup=False)
    rows = [HEADS, *(cells(line) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    for row in rows:
        text = [t.ljust(w) if i in LEFT else t.rjust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True))]
        console.print("  ".join(text).rstrip(), markup=False)
    if not notes or notes[-1] != "best against best":
        console.print(EXPLAINED, markup=False, style="dim")


def _draw(lines: list[Line], config: RunConfig, notes: list[str], path: Path) -> None:
    from gyre.cli.simulation_page import write_page

    write_page(lines, config.name, notes, path)
    console.print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", markup=False)
