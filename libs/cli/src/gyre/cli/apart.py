"""`gyre prepare`, `gyre start`: what a run needs when something else than the local launcher starts its processes.

The order is: prepare, bootstrap (the streams), the processes in any order, start. All four may be repeated.
"""

from pathlib import Path

from gyre.cli.prepare import Say, prepare
from gyre.cli.session import start_run
from gyre.contracts.errors import ConfigError
from gyre.runtime.config import RunConfig, config_digest, load_deployment, load_run
from gyre.runtime.settings import to_toml


def prepare_apart(resolved: RunConfig, out: Path, say: Say) -> None:
    """Make tasks and first checkpoint if they are missing and write the configuration, with absolute paths, to `out`.

    Raises:
        ConfigError: `out` holds another configuration, or something is missing that no command makes.
    """
    text = to_toml(resolved)
    if out.exists() and out.read_text() != text:
        raise ConfigError(f"{out} holds another configuration; a changed run needs another file and another run id")
    prepare(resolved, say)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    say(f"{out} is ready")


async def start_apart(config: Path, deployment: Path, say: Say) -> None:
    """Open the run as soon as its scheduler leads. Raises ConfigError or GyreError."""
    _, already_open = await start_run(load_deployment(deployment), config_digest(load_run(config)))
    say("the run is open already" if already_open else "the run is open")
