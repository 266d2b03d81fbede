"""`gyre demo`: control, run, result line and report of the shipped example."""

from dataclasses import replace
from pathlib import Path

from gyre.cli.ledger import RunLedger
from gyre.cli.metrics import Estimate, estimate_of, gain_of
from gyre.cli.prepare import Say, baselines
from gyre.cli.report import ReportContext, write_report
from gyre.cli.run_dir import RunDir, create
from gyre.cli.train import Options, Watcher, train
from gyre.runtime.config import RunConfig

CONTROL_STEPS = 2
PROVES = ("A 0.1M-parameter model on a CPU proves that every part works together on real processes: tokens, trees, "
          "scores, gradients and weights go round exactly, and reward rises because of it. It proves nothing about how "
          "well or how fast a large model learns.")
NEXT = ("gyre train examples/clinic/clinic.toml --dry-run", "gyre up examples/clinic/clinic.toml, then gyre status",
        "your own harness: see \"Bring your harness\" in README.md")


def control_of(config: RunConfig) -> RunConfig:
    """The same run, shorter and with learning rate 0: what changes without learning."""
    steps = CONTROL_STEPS * config.burst.steps_per_burst
    return replace(config, name=f"{config.name}-control", steps=min(steps, config.steps),
                   optimizer=replace(config.optimizer, learning_rate=0.0),
                   evaluation=replace(config.evaluation, at_start=False))


async def run_demo(config: RunConfig, runs: Path, durability: str, command: list[str], say: Say) -> None:
    """Control, run, report, result. Raises GyreError if any part of it fails."""
    options = Options(allow_unsandboxed=False, durability=durability, baselines=baselines(config))
    say("held-out tasks: " + baselines_text(options.baselines))
    control_config = control_of(config)
    control_run = create(runs, control_config, command)
    say(f"control: {control_config.steps} steps at learning rate 0 ({control_run.path})")
    control = await train(control_run, control_config, options, say)
    run = create(runs, config, command)
    say(f"run: {config.steps} steps ({run.path})")
    watcher = await train(run, config, options, say)
    conclude(run, config, watcher, options, control.ledger, say)


def baselines_text(baselines: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:.3f}" for name, value in baselines.items())


def conclude(run: RunDir, config: RunConfig, watcher: Watcher, options: Options, control: RunLedger | None,
             say: Say) -> None:
    """Print the result of a run that closed and write its report."""
    ledger = watcher.ledger
    before, after = estimate_of(ledger, "before"), estimate_of(ledger, "after")
    control_after = estimate_of(control, "after") if control is not None else None
    context = ReportContext(run_dir=run.path, config=config, baselines=options.baselines, control=control_after,
                            control_rewards=control.evaluation("after").rewards if control is not None else {},
                            proves=PROVES if control is not None else "")
    write_report(ledger, context, run.report)
    if before is not None and after is not None:
        say(f"held-out, {before.num} tasks without timeouts: {before.text()} -> {after.text()}, "
            f"gain {gain_of(ledger).text()}")
    if control_after is not None:
        say(f"control, learning rate 0: {control_after.text()}")
    if options.baselines:
        say("beside: " + baselines_text(options.baselines))
    for check in ledger.checks():
        say(f"exact: {check.text}" if check.ok else f"NOT EXACT: {check.text}")
    if control is not None:
        say(PROVES)
        say("next: " + "\n      ".join(NEXT))
    say(last_line(run, ledger, before, after, control_after))


def last_line(run: RunDir, ledger: RunLedger, before: Estimate | None, after: Estimate | None,
              control: Estimate | None) -> str:
    """The line that scripts read."""
    def value(estimate: Estimate | None) -> str:
        return "none" if estimate is None else f"{estimate.mean:.3f}"

    gain = f"{after.mean - before.mean:.3f}" if before is not None and after is not None else "none"
    return (f"reward before={value(before)} after={value(after)} gain={gain} control={value(control)} "
            f"steps={len(ledger.steps)} executions={ledger.num_executions} "
            f"timeouts_scored={ledger.num_timeouts_scored} report={run.report}")
