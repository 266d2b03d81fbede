"""Bursts of equal staleness, and divisions of the cells: what a fair comparison has to try for every schedule.

Under first-in first-out a sample is trained on average d = phi + (mu - 1) / 2 versions after its dispatch. Comparing
schedules at one (mu, phi) flatters whichever likes it; best against best on a line of equal d does not.
"""

from collections.abc import Iterator
from dataclasses import replace

from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import Simulated, SimulationRequest
from gyre.runtime.config import RunConfig
from gyre.scheduler.simulation.constants import Constants
from gyre.scheduler.simulation.scenario import Shape, scenario_of, shape_of
from gyre.scheduler.simulation.world import World


def staleness_of(steps_per_burst: int, phi: int) -> float:
    """d, in versions."""
    return phi + (steps_per_burst - 1) / 2


def line(config: RunConfig, schedule: str) -> tuple[Shape, ...]:
    """Every shape of `schedule` with the configured mean staleness on the configured number of cells."""
    d = staleness_of(config.burst.steps_per_burst, config.burst.phi)
    total = config.cells.count + config.cells.standalone
    bursts = [(mu, int(d - (mu - 1) / 2)) for mu in range(1, int(2 * d) + 2) if (d - (mu - 1) / 2).is_integer()]
    if schedule in ("colocate", "rollpacker"):
        bursts = [(mu, phi) for mu, phi in bursts if phi == 0]
    standalone, training = [config.cells.standalone], [0]
    if "standalone" in schedule:
        standalone = list(range(1, max(2, total // 2 + 1)))
    elif schedule in ("colocate", "rollpacker"):
        standalone = [0]
    if schedule.startswith("async"):
        standalone, training = [0], list(range(1, max(2, total // 2 + 1)))
    return tuple(Shape(schedule, mu, phi, s, t) for mu, phi in bursts for s in standalone for t in training if s < total > t)


def fitting(config: RunConfig, shape: Shape) -> RunConfig:
    """The configuration with as many steps as whole bursts of `shape` need to do at least what was asked."""
    mu = shape.steps_per_burst
    return replace(config, steps=-(-config.steps // mu) * mu)


def simulate(request: SimulationRequest, config: RunConfig, constants: Constants) -> Iterator[Simulated]:
    """Every run that was asked for, one after another. Raises ConfigError for what no run could have."""
    for schedule in request.schedules:
        shapes = line(config, schedule) if request.sweep else (shape_of(config, schedule),)
        if not shapes:
            raise ConfigError(f"{schedule}: no burst without phi has the mean staleness of steps_per_burst = "
                              f"{config.burst.steps_per_burst}, phi = {config.burst.phi}")
        for shape in shapes:
            for seed in range(request.first_seed, request.first_seed + request.num_seeds):
                run = World(scenario_of(fitting(config, shape), shape, constants, request.rows, seed)).run()
                shown = request.with_lanes and seed == request.first_seed
                yield run if shown else replace(run, stretches=(), levels=())
