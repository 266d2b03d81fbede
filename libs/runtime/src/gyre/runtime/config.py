"""What a run is (`RunConfig`, run.toml) and where its processes live (`Deployment`, deployment.toml).

Each field's meaning stands beside it. Defaults live here and nowhere else. What is not built yet is refused by name.
"""

import hashlib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gyre.contracts.errors import ConfigError
from gyre.contracts.events import RoleClass
from gyre.contracts.ids import check_id
from gyre.runtime.cells import CellsConfig, check_cells
from gyre.runtime.engines import check_engine
from gyre.runtime.losses import LossConfig, check_loss
from gyre.runtime.settings import apply_overrides, parse, read_toml, to_toml
from gyre.runtime.training import TrainingConfig, check_training


@dataclass(frozen=True, slots=True)
class EngineServerConfig:
    """The server of a backend that is a server of its own (vllm, sglang)."""

    python: str = ""  # interpreter of the environment the engine is installed in; empty: $GYRE_<BACKEND>_PYTHON, else found
    arguments: tuple[str, ...] = ()  # added to its command line; a later one wins over ours
    url: str = ""  # instead: one server for cell 0 that runs already, on this machine
    start_timeout_s: float = 600.0  # from its start until it answers


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The rollout engine of every cell."""

    backend: str = "auto"  # auto | torch | scripted | tensorrt_llm | vllm | sglang
    kv_tokens: int = 32768  # size of the KV pool, in tokens
    max_running: int = 128  # live requests at once
    max_waiting: int = 1024  # queued requests; one more is refused
    token_budget: int = 2048  # tokens computed in one iteration
    carry: Literal["recompute", "keep"] = "recompute"  # KV of executions under new weights: computed again, or kept (torch)
    deterministic: bool = False  # equal bits in whatever company; several times slower (torch)
    min_interval_ms: float = 4.0  # between the starts of two iterations, so that requests gather into a batch
    flush_ms: float = 50.0  # longest time a sampled token waits before it is sent on
    move_min_tokens: int = 256  # a call with fewer computed tokens is replayed elsewhere instead of moved
    script_token_ms: float = 1.0  # scripted engine: time per token
    server: EngineServerConfig = field(default_factory=EngineServerConfig)


@dataclass(frozen=True, slots=True)
class PolicyConfigRef:
    """The model that is trained."""

    checkpoint: str  # Hugging Face directory it starts from
    build: tuple[str, ...] = ()  # command that makes the checkpoint if it is not there
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"  # of the engine's weights
    lora_rank: int = 0
    name: str = "policy"  # the model name harnesses see
    implementation: Literal["gyre", "transformers"] = "gyre"  # whose code the trainer and the torch engine run the model with


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """The sampling distribution; a harness cannot change it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512  # cap on the output of one call
    max_context: int = 8192  # prompt + output
    eval_temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class BurstConfig:
    """Bursts and groups."""

    steps_per_burst: int = 1  # mu
    phi: int = 0  # bursts' worth of groups kept outstanding beyond the burst, in steps
    groups_per_step: int = 8  # B
    executions_per_group: int = 8  # N
    max_staleness: int = -1  # versions between dispatch and training; -1: phi + mu - 1

    @property
    def num_outstanding(self) -> int:
        """Q = (phi + mu) * B groups dispatched and not sealed into a step."""
        return (self.phi + self.steps_per_burst) * self.groups_per_step

    @property
    def staleness_limit(self) -> int:
        return self.phi + self.steps_per_burst - 1 if self.max_staleness < 0 else self.max_staleness


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Which paths of a scored execution are trained, and in what packs."""

    max_paths: int = 5  # of one execution; 0: no bound
    preset: Literal["paper", "announcement"] = "paper"  # in which order role classes are admitted
    order: tuple[RoleClass, ...] = ()  # the same by name, instead of a preset; a class that is left out is not trained
    harness: Literal["any", "gyre", "claude-code", "codex", "terminus-2", "openhands"] = "any"  # whose word on roles counts
    train_unseen: bool = False  # train also what the agent never saw: aborted and undelivered answers
    advantage: Literal["grpo", "mean", "rloo"] = "grpo"
    token_budget: int = 4096  # tokens in one micro-step
    pairs_budget: int = 4_000_000  # visible (query, key) pairs in one micro-step
    cost_per_token: float = 1.0
    cost_per_pair: float = 0.001


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW on fp32 master weights."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_ratio: float = 0.1  # of the learning rate at the last step, for linear and cosine
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    compute_dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    claim_lease_s: float = 60.0  # a claim that is not completed in time revokes its worker


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """Task directories: `<root>/<split>/<task>/{instruction.md, task.toml, workspace/, tests/, solution/}`."""

    root: str
    train: str = "train"
    held_out: str = "held-out"
    generate: tuple[str, ...] = ()  # command that makes the root if it is not there


@dataclass(frozen=True, slots=True)
class TimeoutCalls:
    """End about `share` of the training executions while they wait for their n-th call, n in [min, max]."""

    share: float = 0.0
    min: int = 1
    max: int = 1


@dataclass(frozen=True, slots=True)
class HarnessConfig:
    """The black box that is rolled out."""

    command: tuple[str, ...]  # {python}, {config_dir} and {task_dir} are replaced
    environment: dict[str, str] = field(default_factory=dict)  # values may refer to ${NAME}
    timeout_s: float = 3600.0  # the harness timeout: scored
    overall_timeout_s: float = 7200.0  # the infrastructure's timeout: dropped
    timeout_calls: TimeoutCalls = field(default_factory=TimeoutCalls)
    max_concurrent: int = 128
    sandbox: Literal["auto", "bwrap", "none"] = "auto"
    shipped_example: bool = False  # runs without a sandbox where there is none
    tool_format: Literal["hermes", "plain"] = "hermes"
    max_workspace_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """How a preserved workspace is scored."""

    grader: Literal["functions", "harbor", "pytest"] = "functions"
    evaluators: int = 2
    timeout_s: float = 30.0
    max_attempts: int = 3
    reward_key: str = ""  # which key of reward.json, if it has several


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Held-out evaluation, without timeouts by calls."""

    num_tasks: int = 64  # 0: none
    executions_per_task: int = 1
    at_start: bool = True
    at_end: bool = True
    baselines: tuple[str, ...] = ()  # command that prints {"do_nothing": x, "random": x, "oracle": x}


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Durable checkpoints at burst ends."""

    keep_last: int = 2
    keep_every: int = 0  # 0: none beyond the last


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """OpenTelemetry: to OTLP when an endpoint is given, to a local file otherwise. Role transitions: to the file always."""

    otlp_endpoint: str = ""
    trace_calls: bool = False  # also a span per model call


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run, whole."""

    name: str
    policy: PolicyConfigRef
    tasks: TasksConfig
    harness: HarnessConfig
    steps: int = 1
    seed: int = 0
    cells: CellsConfig = field(default_factory=CellsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    burst: BurstConfig = field(default_factory=BurstConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`listen`: what the process binds; `address`: what its peers dial."""

    listen: str
    address: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where the processes of one run live. Paths are absolute or relative to the deployment file."""

    run: str
    nats_url: str
    state_dir: str  # each process keeps its SQLite file below it
    cells_dir: str  # shared by a cell's engine and trainer worker
    blobs: str  # directory or fsspec URL
    log_dir: str
    checkpoint_dir: str
    gateway: Endpoint
    gateway_url: str  # as the harness sees it
    scheduler: Endpoint
    rollout: Endpoint
    trajectory: Endpoint
    engines: tuple[Endpoint, ...]
    trainers: tuple[Endpoint, ...]
    evaluators: tuple[Endpoint, ...]
    transfers: tuple[Endpoint, ...]  # the trainer workers' transfer servers
    transfer: Literal["auto", "shared_memory", "tcp", "nixl"] = "auto"  # how weights and gradients are read
    memory_dir: str = ""  # memory shared on one machine; on a tmpfs nothing of it is written back; empty: below cells_dir
    allow_unsandboxed: bool = False
    durability: Literal["power", "process"] = "power"  # what a commit survives

    @property
    def regions_dir(self) -> str:
        """Where registered memory is mapped."""
        return self.memory_dir or f"{self.cells_dir}/transfer"


SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
NOT_BUILT = {
    "cells.tensor_parallel": "tensor parallelism", "cells.context_parallel": "context parallelism",
    "cells.expert_parallel": "expert parallelism", "cells.nodes_per_cell": "several nodes in a cell",
}


def load_run(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read, override and check a run's configuration.

    Raises:
        ConfigError: names the key, its value and what would be right.
    """
    tables = apply_overrides(read_toml(path), overrides or [])
    config = parse(tables, RunConfig, str(path))
    check_run(config)
    return config


def load_deployment(path: Path) -> Deployment:
    """Read a deployment; relative paths are resolved against its directory. Raises ConfigError."""
    tables = read_toml(path)
    for key in ("state_dir", "cells_dir", "memory_dir", "log_dir", "checkpoint_dir", "blobs"):
        value = tables.get(key)
        if isinstance(value, str) and value and "://" not in value:
            tables[key] = str((path.parent / value).resolve())
    deployment = parse(tables, Deployment, str(path))
    check_id(deployment.run, "run")
    return deployment


def check_run(config: RunConfig) -> None:
    """Refuse what cannot work or is not built. Raises ConfigError."""
    check_id(config.name, "name")
    _check_not_built(config)
    check_loss(config.loss, config.admission.advantage)
    check_training(config.training, config.optimizer.compute_dtype)
    positive = {
        "steps": config.steps, "cells.count": config.cells.count,
        "burst.steps_per_burst": config.burst.steps_per_burst,
        "burst.groups_per_step": config.burst.groups_per_step, "reward.evaluators": config.reward.evaluators,
        "burst.executions_per_group": config.burst.executions_per_group,
        "admission.token_budget": config.admission.token_budget, "admission.pairs_budget": config.admission.pairs_budget,
        "engine.kv_tokens": config.engine.kv_tokens, "harness.timeout_s": config.harness.timeout_s,
        "sampling.temperature": config.sampling.temperature, "harness.max_concurrent": config.harness.max_concurrent,
    }
    for key, value in positive.items():
        if value <= 0:
            raise ConfigError(f"{key} = {value}: must be greater than 0")
    for key, value in {"burst.phi": config.burst.phi, "admission.max_paths": config.admission.max_paths,
                       "optimizer.learning_rate": config.optimizer.learning_rate,
                       "evaluation.num_tasks": config.evaluation.num_tasks}.items():
        if value < 0:
            raise ConfigError(f"{key} = {value}: must not be negative")
    if not config.harness.command:
        raise ConfigError("harness.command = []: give the command line that starts your harness")
    if config.steps % config.burst.steps_per_burst:
        raise ConfigError(f"steps = {config.steps}: must be a multiple of burst.steps_per_burst "
                          f"= {config.burst.steps_per_burst}")
    calls = config.harness.timeout_calls
    if not (0 <= calls.share <= 1 and 1 <= calls.min <= calls.max):
        raise ConfigError(f"harness.timeout_calls = {calls}: share must be in [0, 1] and 1 <= min <= max")
    for name, value in config.harness.environment.items():
        if SECRET_NAME.search(name) and not value.startswith("${"):
            raise ConfigError(f"harness.environment.{name}: looks like a secret; write it as ${{{name}}} and set it in the "
                              "environment, so that it is in no file")
    if config.harness.overall_timeout_s <= config.harness.timeout_s:
        raise ConfigError(f"harness.overall_timeout_s = {config.harness.overall_timeout_s}: must be longer than "
                          f"harness.timeout_s = {config.harness.timeout_s}")


def _check_not_built(config: RunConfig) -> None:
    for key, what in NOT_BUILT.items():
        value = getattr(config.cells, key.partition(".")[2])
        if value != 1:
            raise ConfigError(f"{key} = {value}: {what} is not built yet; use 1")
    if config.policy.lora_rank:
        raise ConfigError(f"policy.lora_rank = {config.policy.lora_rank}: LoRA is not built yet; use 0")
    check_engine(config)
    check_cells(config.cells, config.burst.phi)
    if config.sampling.top_p != 1.0 or config.sampling.top_k != 0:
        raise ConfigError(f"sampling.top_p = {config.sampling.top_p}, top_k = {config.sampling.top_k}: training on a truncated "
                          "distribution is not built yet; use top_p = 1.0 and top_k = 0")


def config_digest(config: RunConfig) -> str:
    """32 hex digits that change whenever any resolved value changes."""
    return hashlib.blake2b(to_toml(config).encode(), digest_size=16).hexdigest()


def fill(command: tuple[str, ...], **values: str) -> list[str]:
    """A command line with `{python}` and the given `{names}` replaced. Raises ConfigError for an unknown name."""
    try:
        return [part.format(python=sys.executable, **values) for part in command]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"command {list(command)}: {{{error.args[0]}}} is unknown; "
                          f"known: python, {', '.join(values)}") from None
