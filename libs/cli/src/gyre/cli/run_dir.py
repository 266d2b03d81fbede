"""`runs/NAME/`: everything one run leaves behind, and the two files its processes start from.

run.toml         resolved configuration (paths absolute, secrets only as ${NAME})
deployment.toml  addresses and directories
manifest.json    commit, versions, seed, task and model digests, command
pids.json        the processes of the launcher that has it open
metrics.jsonl    one row per finished step
state/ cells/ blobs/ nats/ logs/ checkpoints/ report.html
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from gyre.contracts.errors import ConfigError
from gyre.runtime.config import RunConfig, config_digest
from gyre.runtime.settings import to_toml

PACKAGES = ("torch", "numpy", "nats-py", "grpcio", "msgpack", "tokenizers", "safetensors", "opengyre-contracts")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "run.toml"

    @property
    def deployment(self) -> Path:
        return self.path / "deployment.toml"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def pids(self) -> Path:
        return self.path / "pids.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


def resolve_paths(config: RunConfig, config_dir: Path) -> RunConfig:
    """The configuration with every path absolute and `{config_dir}` replaced, so that it can be moved."""
    def absolute(path: str) -> str:
        return str((config_dir / path).resolve())

    def filled(command: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(part.replace("{config_dir}", str(config_dir.resolve())) for part in command)

    return replace(
        config,
        policy=replace(config.policy, checkpoint=absolute(config.policy.checkpoint), build=filled(config.policy.build)),
        loss=replace(config.loss, kl_reference=config.loss.kl_reference and absolute(config.loss.kl_reference)),
        tasks=replace(config.tasks, root=absolute(config.tasks.root), generate=filled(config.tasks.generate)),
        harness=replace(config.harness, command=filled(config.harness.command)),
        evaluation=replace(config.evaluation, baselines=filled(config.evaluation.baselines)))


def create(root: Path, config: RunConfig, command: list[str]) -> RunDir:
    """A fresh directory for `config` under `root`; a taken name gets a number."""
    number, path = 1, root / config.name
    while path.exists():
        number += 1
        path = root / f"{config.name}-{number}"
    path.mkdir(parents=True)
    run = RunDir(path.resolve())
    run.config.write_text(to_toml(config))
    run.manifest.write_text(json.dumps(manifest_of(config, command), indent=2) + "\n")
    return run


def open_existing(path: Path) -> RunDir:
    """The directory of an earlier run. Raises ConfigError if it is none."""
    run = RunDir(path.resolve())
    if not run.config.exists():
        raise ConfigError(f"{path}: no run there (run.toml is missing)")
    return run


def manifest_of(config: RunConfig, command: list[str]) -> dict[str, Any]:
    """What somebody needs to know to make this run again."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"name": config.name, "seed": config.seed, "config_digest": config_digest(config), "commit": _commit(),
            "command": command, "python": platform.python_version(), "platform": platform.platform(),
            "cpus": os.cpu_count(), "versions": versions, "tasks_digest": digest_of_tree(Path(config.tasks.root)),
            "checkpoint_digest": digest_of_tree(Path(config.policy.checkpoint))}


def _commit() -> str:
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10,
                                cwd=Path(__file__).parent)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def digest_of_tree(root: Path) -> str:
    """One digest over names and contents of all files below `root`; empty if it does not exist."""
    if not root.exists():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_pids(run: RunDir, pids: dict[str, int]) -> None:
    """Atomically note who runs; `launcher` is this process."""
    aside = run.pids.with_suffix(".tmp")
    aside.write_text(json.dumps({"launcher": os.getpid(), **pids}, indent=2) + "\n")
    aside.replace(run.pids)


def read_pids(run: RunDir) -> dict[str, int]:
    """The processes of this run that are alive; empty if nothing runs."""
    try:
        pids = json.loads(run.pids.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return {name: pid for name, pid in pids.items() if _is_ours(pid)}


def _is_ours(pid: int) -> bool:
    """Whether `pid` is alive and one of our programs (a number may have been reused)."""
    try:
        process = psutil.Process(pid)
        line = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and ("gyre" in line or "nats-server" in line)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def find_running(root: Path) -> RunDir | None:
    """The newest run under `root` whose launcher is alive."""
    found = [RunDir(p.parent.resolve()) for p in root.glob("*/pids.json")]
    alive = [run for run in found if "launcher" in read_pids(run)]
    return max(alive, key=lambda run: run.pids.stat().st_mtime, default=None)


def command_line() -> list[str]:
    """The command this process was started with, as a user would type it."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
