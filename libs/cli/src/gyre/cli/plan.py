"""`--dry-run`: what would be started, with what memory, how much would be outstanding and how stale data may get."""

import json
from pathlib import Path

from gyre.runtime.config import RunConfig
from gyre.runtime.losses import describe_loss
from gyre.runtime.settings import to_toml

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def count_parameters(checkpoint: Path) -> int | None:
    """Parameters of a safetensors checkpoint, read from its header; None if it is not there yet."""
    path = checkpoint / "model.safetensors"
    if not path.exists():
        return None
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            size = 1
            for length in entry["shape"]:
                size *= length
            total += size
    return total


def describe(config: RunConfig) -> str:
    """The resolved configuration and what follows from it, for people."""
    burst, cells = config.burst, config.cells.count
    lines = [to_toml(config), "# what this starts", *(f"#   {line}" for line in processes(config)), "#"]
    lines += [f"# outstanding groups Q = (phi + mu) * B = {burst.num_outstanding}, "
              f"{burst.num_outstanding * burst.executions_per_group} executions at once",
              f"# loss: {describe_loss(config.loss)}",
              f"# staleness: at most {burst.staleness_limit} versions between dispatch and training",
              f"# bursts: {config.steps // burst.steps_per_burst} of {burst.steps_per_burst} steps, {cells} cells"
              f"{f' and {config.cells.standalone} standalone ones' if config.cells.standalone else ''}, "
              f"schedule {config.cells.schedule}"]
    return "\n".join([*lines, *memory(config)])


def processes(config: RunConfig) -> list[str]:
    """One line per process of the deployment."""
    cells = range(config.cells.count)
    return ["nats-server (JetStream on disk)", "gyre-scheduler", "gyre-rollout serve",
            *(f"gyre-rollout engine --cell {cell}" + ("" if cell in cells else " (standalone)")
              for cell in range(config.cells.num_engines)), "gyre-trajectory",
            *(f"gyre-reward evaluator --index {i}" for i in range(config.reward.evaluators)),
            *(f"gyre-trainer worker --cell {cell}" + (" (core)" if cell == 0 else "") for cell in cells)]


def memory(config: RunConfig) -> list[str]:
    """Memory of weights, gradients and optimizer state, in MB per cell."""
    num = count_parameters(Path(config.policy.checkpoint))
    if num is None:
        return ["# memory: unknown until the checkpoint exists"]
    weights = num * BYTES[config.policy.dtype] / 1e6
    reference = num * BYTES[config.optimizer.compute_dtype] / 1e6 if config.loss.has_reference_policy else 0.0
    master, gradients, moments = num * 4 / 1e6, num * 4 / 1e6, num * 8 / 1e6
    return [f"# memory per cell: engine weights {weights:.1f} MB, KV pool of {config.engine.kv_tokens} tokens; "
            f"trainer master {master:.1f} + gradients {gradients:.1f} MB"
            + (f" + reference policy {reference:.1f} MB" if reference else "") + f", core also optimizer {moments:.1f} MB "
            f"({num:,} parameters)"]
