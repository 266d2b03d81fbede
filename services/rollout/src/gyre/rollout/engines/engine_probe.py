"""Whether an engine's environment would serve, asked of its own interpreter in a child process. No server is started."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre.contracts.errors import ConfigError

_CHILD = Path(__file__).with_name("inside_probe.py")
TIMEOUT_S = 60.0  # it takes a second, but file systems are slow when they are cold


@dataclass(frozen=True)
class Needs:
    """`modules` must be there, `useful` may. `routes`: by package, what must stand in its source."""

    distributions: tuple[str, ...]
    modules: tuple[str, ...] = ()
    useful: tuple[str, ...] = ()
    routes: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """What an environment has. `accelerator`: version of CUDA or ROCm its torch was built for, '' for a CPU build."""

    versions: Mapping[str, str | None]
    modules: frozenset[str] = frozenset()
    lacks_routes: tuple[str, ...] = ()
    accelerator: str = ""

    def lacking(self, needs: Needs) -> str:
        """Which of the needs are not met, '' if all are."""
        missing = [*(name for name in needs.modules if name not in self.modules), *self.lacks_routes]
        return f"it lacks {', '.join(missing)}, which this adapter uses" if missing else ""


def probe_environment(python: Path | str, needs: Needs, timeout_s: float = TIMEOUT_S) -> Environment:
    """Asks an interpreter what its environment has.

    Raises:
        ConfigError: there is no such interpreter, it does not run, or it does not answer in time.
    """
    wanted = {
        "distributions": needs.distributions, "modules": [*needs.modules, *needs.useful],
        "routes": {package: sorted(routes) for package, routes in needs.routes.items()},
    }  # fmt: skip
    named = f"engine.server.python = {str(python)!r}"
    try:
        done = subprocess.run([str(python), "-I", str(_CHILD), json.dumps(wanted)], capture_output=True, text=True,
                              timeout=timeout_s, check=True)  # fmt: skip
        said = json.loads(done.stdout)
        return Environment(said["versions"], frozenset(said["modules"]), tuple(said["lacks_routes"]), said["accelerator"] or "")
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{named}: did not say what it has within {timeout_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{named}: cannot be run ({error}): {error.stderr.strip()[-300:]}") from None
    except OSError as error:
        raise ConfigError(f"{named}: cannot be run ({error})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{named}: does not answer as a Python interpreter does ({error!r})") from None


def cpu_build_on(device: str, is_cpu_build: bool) -> str:
    """The problem of a CPU build where a GPU is to be used, '' if there is none."""
    if device == "cuda" and is_cpu_build:
        return "a CPU build, but the cells are on a GPU; install its CUDA build, or set cells.device = 'cpu'"
    return ""
