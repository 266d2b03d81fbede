"""What has to exist before a run starts: task directories, the checkpoint it starts from, baseline values.

Each is made by a command of the configuration if it is not there, with its output shown; a second call skips it.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.contracts.errors import ConfigError
from gyre.runtime.config import RunConfig, fill

Say = Callable[[str], None]


def prepare(config: RunConfig, say: Say) -> None:
    """Make task directories and checkpoint if they are missing.

    Raises:
        ConfigError: something is missing and there is no command that makes it, or the command failed.
    """
    root, checkpoint = Path(config.tasks.root), Path(config.policy.checkpoint)
    if not (root / config.tasks.train).is_dir():
        _make("tasks.generate", config.tasks.generate, root, say, root=str(root), seed=str(config.seed))
    if not (checkpoint / "config.json").is_file():
        _make("policy.build", config.policy.build, checkpoint, say, checkpoint=str(checkpoint), seed=str(config.seed),
              root=str(root))
    reference = config.loss.kl_reference
    if reference and not (Path(reference) / "config.json").is_file():
        raise ConfigError(f"loss.kl_reference = {reference!r}: has no config.json; name a Hugging Face directory, or leave it "
                          "out for the checkpoint that the run starts from")


def _make(key: str, command: tuple[str, ...], target: Path, say: Say, **values: str) -> None:
    if not command:
        raise ConfigError(f"{target} is missing and {key} names no command that makes it")
    say(f"making {target}")
    line = fill(command, **values)
    result = subprocess.run(line, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if result.returncode != 0:
        raise ConfigError(f"{key} = {line}: ended with code {result.returncode}")
    if not target.exists():
        raise ConfigError(f"{key} = {line}: ended well but did not make {target}")


def baselines(config: RunConfig) -> dict[str, float]:
    """What doing nothing, acting at random and the oracle score on the held-out tasks; empty without a command or tasks.

    Raises:
        ConfigError: the command failed or did not print numbers.
    """
    if not config.evaluation.baselines or not config.evaluation.num_tasks:
        return {}
    line = fill(config.evaluation.baselines, root=config.tasks.root, seed=str(config.seed),
                num_tasks=str(config.evaluation.num_tasks))
    result = subprocess.run(line, check=False, capture_output=True, text=True)
    try:
        values: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
        return {name: float(value) for name, value in values.items()}
    except (IndexError, ValueError, AttributeError) as error:
        raise ConfigError(f"evaluation.baselines = {line}: code {result.returncode}, no JSON numbers: "
                          f"{result.stdout[-200:]}{result.stderr[-500:]}") from error
