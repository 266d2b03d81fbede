"""`gyre`: the command line. Each command is a few lines over the module that does the work."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from gyre.cli import plan
from gyre.cli.prepare import baselines, prepare
from gyre.cli.run_dir import RunDir, command_line, create, find_running, open_existing, read_pids, resolve_paths
from gyre.cli.simulate_command import simulate
from gyre.cli.trace_command import trace
from gyre.cli.tree_command import tree_app
from gyre.contracts.errors import ConfigError, GyreError
from gyre.runtime.config import RunConfig, load_run
from rich.console import Console

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Train LLM agents by reinforcement learning on live harness executions.")
app.add_typer(tree_app, name="tree")
app.command()(trace)
app.command()(simulate)
console = Console(highlight=False, soft_wrap=True)

ConfigPath = Annotated[Path, typer.Argument(help="the run's configuration (TOML)")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="override, e.g. --set burst.steps_per_burst=2")]
Runs = Annotated[Path, typer.Option("--runs", help="where runs are kept")]
RunPath = Annotated[Path | None, typer.Option("--run", help="a run's directory; default: the one that is up")]
Unsandboxed = Annotated[bool, typer.Option("--allow-unsandboxed", help="run harnesses without a sandbox if there is none")]
Durability = Annotated[str, typer.Option("--durability", help="what a commit survives: process or power")]


@app.callback()
def quiet() -> None:
    """Train LLM agents by reinforcement learning on live harness executions."""
    # A server that is still starting, or being stopped, is no news; what matters ends a command with its message.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")


def say(text: str) -> None:
    """One line for people."""
    console.print(text, markup=False)


def finish(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine; errors made on purpose end the program with their message and code 1."""
    try:
        return asyncio.run(work)
    except ConfigError as error:
        console.print(f"gyre: {error}", markup=False, style="red")
        raise typer.Exit(2) from None
    except GyreError as error:
        console.print(f"gyre: {error}", markup=False, style="red")
        raise typer.Exit(130 if type(error).__name__ == "Interrupted" else 1) from None


@contextlib.contextmanager
def configured() -> Any:
    """Configuration errors end the program with their message and code 2."""
    try:
        yield
    except ConfigError as error:
        console.print(f"gyre: {error}", markup=False, style="red")
        raise typer.Exit(2) from None


def load(config: Path, sets: list[str] | None) -> RunConfig:
    """Read, override, check; paths become absolute."""
    return resolve_paths(load_run(config, sets), config.resolve().parent)


@app.command()
def train(config: Annotated[Path | None, typer.Argument(help="the run's configuration (TOML)")] = None,
          sets: Sets = None, runs: Runs = Path("runs"),
          resume: Annotated[Path | None, typer.Option(help="go on with an earlier run")] = None,
          attach: Annotated[bool, typer.Option("--attach", help="open the run that `gyre up` started")] = False,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be started, start nothing")] = False,
          allow_unsandboxed: Unsandboxed = False, durability: Durability = "process") -> None:
    """Train: start every process, run to the end, write the report, stop everything."""
    from gyre.cli.demo import conclude
    from gyre.cli.train import Options
    from gyre.cli.train import train as run_training

    with configured():
        if dry_run:
            say(plan.describe(load(_needed(config), sets)))
            return
        run, resolved = _run_for(config, sets, runs, resume, attach)
        options = Options(allow_unsandboxed, durability, {} if resume else baselines(resolved))
    watcher = finish(run_training(run, resolved, options, say, attach))
    conclude(run, resolved, watcher, options, control=None, say=say)


def _needed(config: Path | None) -> Path:
    if config is None:
        raise ConfigError("name a configuration: gyre train CONFIG.toml")
    return config


def _run_for(config: Path | None, sets: list[str] | None, runs: Path, resume: Path | None,
             attach: bool) -> tuple[RunDir, RunConfig]:
    """The run's directory: a fresh one, that of an earlier run, or that of the run that is up."""
    if resume or attach:
        run = open_existing(resume) if resume else find_running(runs)
        if run is None:
            raise ConfigError(f"no run is up under {runs}; start one with `gyre up CONFIG.toml`")
        if resume and read_pids(run):
            raise ConfigError(f"{resume}: its processes still run; stop them with `gyre down --run {resume}`")
        if sets:
            raise ConfigError("--set: a run that exists keeps its configuration")
        return run, load_run(run.config)
    resolved = load(_needed(config), sets)
    prepare(resolved, say)
    return create(runs, resolved, command_line()), resolved


@app.command()
def up(config: ConfigPath, sets: Sets = None, runs: Runs = Path("runs"), allow_unsandboxed: Unsandboxed = False,
       durability: Durability = "process") -> None:
    """Start every process of a run and keep it up; nothing is dispatched until `gyre train --attach`."""
    from gyre.cli.train import Options
    from gyre.cli.train import up as keep_up

    with configured():
        run, resolved = _run_for(config, sets, runs, None, False)
    finish(keep_up(run, resolved, Options(allow_unsandboxed, durability), say))


@app.command()
def status(runs: Runs = Path("runs"), run: RunPath = None) -> None:
    """Every process, its role and weights version, and the waterlevel."""
    from gyre.cli.status import status_table

    with configured():
        found = open_existing(run) if run else find_running(runs)
    if found is None or not read_pids(found):
        say(f"no run is up under {runs}")
        raise typer.Exit(1)
    console.print(finish(status_table(found)))


@app.command()
def down(runs: Runs = Path("runs"), run: RunPath = None) -> None:
    """Stop every process of the run that is up."""
    with configured():
        found = open_existing(run) if run else find_running(runs)
    pids = read_pids(found) if found else {}
    if found is None or not pids:
        say(f"no run is up under {runs}")
        return
    # The launcher stops its processes in order; only without it they are stopped one by one.
    targets = {"launcher": pids["launcher"]} if "launcher" in pids else pids
    for pid in targets.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 40
    while read_pids(found) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = read_pids(found)
    say(f"run {found.name}: " + (f"still running: {left}" if left else "stopped"))
    raise typer.Exit(1 if left else 0)


@app.command()
def demo(config: ConfigPath, sets: Sets = None, runs: Runs = Path("runs"), durability: Durability = "process") -> None:
    """The shipped example: a control with learning rate 0, the run itself, and a report."""
    from gyre.cli.demo import run_demo

    with configured():
        resolved = load(config, sets)
        prepare(resolved, say)
    finish(run_demo(resolved, runs, durability, command_line(), say))


@app.command()
def bootstrap(nats: Annotated[str, typer.Option(help="URL of the NATS server", envvar="GYRE_NATS_URL")],
              replicas: Annotated[int, typer.Option(help="copies of each stream")] = 1) -> None:
    """Create the streams on a NATS server; streams that exist are kept with what is in them."""
    from gyre.cli.launcher import connect_patiently

    async def create_streams() -> None:
        bus = await connect_patiently(nats)
        await bus.bootstrap(replicas)
        await bus.close()

    finish(create_streams())
    say("streams are there")


@app.command("prepare")
def prepare_command(config: ConfigPath, out: Annotated[Path, typer.Option(help="where the resolved configuration goes")],
                    sets: Sets = None) -> None:
    """Make what a run starts from and write its configuration with absolute paths, for processes started apart."""
    from gyre.cli.apart import prepare_apart

    with configured():
        prepare_apart(load(config, sets), out, say)


@app.command()
def start(config: Annotated[Path, typer.Option(help="the resolved configuration", envvar="GYRE_CONFIG")],
          deployment: Annotated[Path, typer.Option(help="where the processes live", envvar="GYRE_DEPLOYMENT")]) -> None:
    """Open a run whose processes were started apart, as soon as its scheduler leads."""
    from gyre.cli.apart import start_apart

    finish(start_apart(config, deployment, say))


if __name__ == "__main__":
    sys.exit(app())
