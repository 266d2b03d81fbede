"""What the simulation assumes beside the run's own configuration: the optional constants file, field by field.

The defaults are the published system's where it gives figures (marked "paper"); the others are guesses.
"""

from dataclasses import dataclass, field

from gyre.contracts.errors import ConfigError

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class LognormalConstants:
    """Executions drawn from a distribution. The defaults give the paper's mean execution and mean longest of 8."""

    mean_s: float = 1.93 * HOUR  # of the capped durations (paper)
    sigma: float = 0.335 # of log duration; with cap and 8 executions a group's longest takes 2.96 h (paper)
    cap_s: float = 4.0 * HOUR  # an execution is ended then, and scored
    correlation: float = 0.0  # of log durations inside a group, 0 to 1
    context_median: float = 148_000.0  # tokens at the end (recorded coding-agent sessions)
    context_sigma: float = 0.66
    context_correlation: float = 0.5  # of a context with the execution's duration


@dataclass(frozen=True, slots=True)
class RolloutConstants:
    """Engines and executions."""

    overload: float = 1.0  # at load L above capacity C everything runs (L/C)^overload times slower
    slowdown: float = 0.0  # time per token at full load is 1 + slowdown times that of an empty cell
    context_start: float = 0.1  # share of its last context that an execution begins with; it grows evenly from there
    move_stall_s: float = 2.0  # of an execution whose cell leaves
    replay_stall_s: float = 60.0  # of an execution whose KV is gone: lost with its cell, or preempted
    evaluation_s: float = 60.0  # from the end of an execution to its score
    contexts_every_s: float = 60.0  # between two reports of contexts


@dataclass(frozen=True, slots=True)
class TrainingConstants:
    """Costs are cell-seconds: what one cell gets done in a second."""

    seconds_per_second: float = 0.0121  # training of one execution per second of its duration
    micro_steps: int = 1  # that an execution's training is cut into
    update_s: float = 60.0  # reduction, optimizer, and the satellites' next weights, per step
    publish_s: float = 10.0  # checkpoint and publication at a burst's end


@dataclass(frozen=True, slots=True)
class TransitionConstants:
    """Rollout to train takes 8.52 s, train to rollout 3.46 s (paper); how they divide into stages is a guess."""

    release_s: float = 3.0  # drain, move, sleep: until the engine is off the devices
    join_s: float = 5.52  # wake, weights, zeroed gradients: until the trainer takes part
    leave_s: float = 1.0  # until the trainer is off the devices
    ready_s: float = 2.46  # wake, weights, probe: until the engine serves
    swap_s: float = 2.0  # new weights in an engine that never left rollout; everything in it stands still
    fact_s: float = 0.05  # from something happening until the scheduler has read of it


@dataclass(frozen=True, slots=True)
class Loss:
    """Cell `cell` answers nothing for `for_s` seconds from second `at_s` on."""

    cell: int
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants file, whole."""

    lognormal: LognormalConstants = field(default_factory=LognormalConstants)
    rollout: RolloutConstants = field(default_factory=RolloutConstants)
    training: TrainingConstants = field(default_factory=TrainingConstants)
    transition: TransitionConstants = field(default_factory=TransitionConstants)
    losses: tuple[Loss, ...] = ()
    max_concurrent: int = 0  # executions that run at once; 0: harness.max_concurrent


NOT_NEGATIVE = ("rollout.overload", "rollout.slowdown", "rollout.move_stall_s", "rollout.replay_stall_s",
                "rollout.evaluation_s", "training.seconds_per_second", "training.update_s", "training.publish_s",
                "transition.release_s", "transition.join_s", "transition.leave_s", "transition.ready_s",
                "transition.swap_s", "transition.fact_s", "lognormal.sigma", "lognormal.context_sigma")
POSITIVE = ("lognormal.mean_s", "lognormal.cap_s", "lognormal.context_median", "rollout.contexts_every_s",
            "training.micro_steps")
SHARES = ("lognormal.correlation", "lognormal.context_correlation", "rollout.context_start")


def check_constants(constants: Constants, num_cells: int) -> None:
    """Refuse what cannot be. Raises ConfigError naming the field."""
    def value_of(key: str) -> float:
        section, _, name = key.partition(".")
        return getattr(getattr(constants, section), name)

    for keys, holds, right in ((NOT_NEGATIVE, lambda v: v >= 0, "must not be negative"),
                               (POSITIVE, lambda v: v > 0, "must be greater than 0"),
                               (SHARES, lambda v: 0 <= v <= 1, "must be in [0, 1]")):
        for key in keys:
            if not holds(value_of(key)):
                raise ConfigError(f"{key} = {value_of(key):g}: {right}")
    drawn = constants.lognormal
    if drawn.mean_s >= drawn.cap_s:
        raise ConfigError(f"lognormal.mean_s = {drawn.mean_s:g}: must be less than lognormal.cap_s = {drawn.cap_s:g}")
    for number, loss in enumerate(constants.losses):
        if not 0 <= loss.cell < num_cells or loss.at_s < 0 or loss.for_s <= 0:
            raise ConfigError(f"losses[{number}] = {loss}: cell must be in [0, {num_cells}), at_s not negative, for_s positive")
