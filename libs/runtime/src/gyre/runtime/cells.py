"""The cells of a run and the schedule that arranges them: `[cells]` of run.toml."""

from dataclasses import dataclass

from gyre.contracts.errors import ConfigError

SCHEDULES = ("elastic", "async", "async+streaming", "colocate", "colocate+standalone", "colocate+standalone+streaming",
             "rollpacker")


@dataclass(frozen=True, slots=True)
class CellsConfig:
    """The cells: equal sets of accelerators that switch role."""

    count: int = 2  # K
    schedule: str = "colocate"  # how cells and steps are arranged in time
    standalone: int = 0  # rollout cells that never train, beside the others
    training: int = 0  # cells that train under `async`; 0: half of them
    executions_per_cell: int = 0  # that one cell serves at full speed; 0: engine.max_running
    transition_timeout_s: float = 600.0  # a cell that has not confirmed its role by then is counted out
    nodes_per_cell: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    device: str = "auto"  # auto | cpu | cuda

    @property
    def num_training(self) -> int:
        """Cells that train under `async`."""
        return self.training or self.count // 2

    @property
    def num_engines(self) -> int:
        """Cells that can roll out: all of them."""
        return self.count + self.standalone

    @property
    def streams(self) -> bool:
        """Whether a step is worked on before its last group has joined it."""
        return self.schedule in ("elastic", "rollpacker") or self.schedule.endswith("+streaming")


def check_cells(cells: CellsConfig, phi: int) -> None:
    """Whether the schedule has the cells and the bursts it needs. Raises ConfigError."""
    name = cells.schedule
    if name not in SCHEDULES:
        raise ConfigError(f"cells.schedule = {name!r}: unknown; use {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}")
    if phi and name in ("colocate", "rollpacker"):
        raise ConfigError(f"burst.phi = {phi}: {name} carries nothing over a burst; use 0")
    for key in ("standalone", "training", "executions_per_cell"):
        if getattr(cells, key) < 0:
            raise ConfigError(f"cells.{key} = {getattr(cells, key)}: must not be negative")
    if cells.transition_timeout_s <= 0:
        raise ConfigError(f"cells.transition_timeout_s = {cells.transition_timeout_s}: must be greater than 0")
    if "standalone" in name and cells.standalone == 0:
        raise ConfigError(f"cells.standalone = 0: {name} needs at least one cell that never trains")
    if name in ("colocate", "rollpacker") and cells.standalone:
        raise ConfigError(f"cells.standalone = {cells.standalone}: {name} has none; use 0, or another cells.schedule")
    if not name.startswith("async"):
        if cells.training:
            raise ConfigError(f"cells.training = {cells.training}: only async divides the cells; use 0")
    elif cells.num_training >= cells.count + cells.standalone or cells.num_training > cells.count or cells.num_training < 1:
        raise ConfigError(f"cells.training = {cells.training}: of {cells.count} cells and {cells.standalone} standalone ones "
                          "at least one has to train and one to roll out")
