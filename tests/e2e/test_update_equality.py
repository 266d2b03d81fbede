"""What the elastic schedule computes is what one cell alone computes on the same admitted data."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gyre.contracts import events as e
from gyre.policy.checkpoint import load_state
from gyre.runtime.blobs import open_blobs
from gyre.runtime.clock import SystemClock
from gyre.runtime.config import load_deployment
from gyre.trainer.backends.base import Backend
from gyre.trainer.backends.launch import open_backend
from gyre.trainer.claims import ClaimTable, Verdict
from gyre.trainer.compute import compute
from gyre.trainer.config import TrainerConfig, learning_rate, trainer_config
from gyre.trainer.reduce import apply_update
from lap import Lap, clinic_config

pytestmark = pytest.mark.slow
ELASTIC = ("cells.schedule=elastic", "cells.count=3", "cells.executions_per_cell=6", "burst.phi=1", "steps=3",
           "optimizer.compute_dtype=float64", "policy.dtype=float64", "checkpoints.keep_last=10", "evaluation.num_tasks=0",
           "admission.token_budget=256", "loss.entropy_coefficient=0.01")  # an untrained policy earns no advantage


@torch.no_grad()
def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


async def test_weights_after_every_step_are_those_of_one_cell_alone(tmp_path: Path) -> None:
    lap = Lap(tmp_path, clinic_config(tmp_path, *ELASTIC))
    assert await lap.to_the_end() == "completed"
    lap.assert_books_balance()
    ledger = lap.watcher.ledger
    assert {a.fact.role for a in ledger.all(e.CellRoleAssigned).values()} == {"train", "rollout"}
    refs = {ref.micro_step: ref for g in ledger.all(e.GroupCompleted).values() for ref in g.fact.micro_steps}
    config = replace(trainer_config(lap.config, load_deployment(lap.run.deployment), 0), cells=1)
    opened = open_backend(config, None)
    blobs = open_blobs(config.blobs)
    for sealed in (s.fact for s in ledger.all(e.StepSealed).values()):
        table = ClaimTable(sealed.step, 0, "core", 60.0)
        table.add(tuple(refs[name] for name in sealed.micro_steps))
        table.seal()
        opened.backend.zero_gradients()
        while (claimed := table.claim("core", 0.0))[0] is Verdict.WORK:
            sums = await compute(opened.backend, blobs, claimed[1], SystemClock())
            table.complete("core", claimed[1].micro_step, sums, 0.0)
        await asyncio.to_thread(update, opened.backend, table, config, sealed)
        elastic = load_state(config.checkpoints / f"version-{sealed.step + 1:06d}")
        assert difference(opened.backend.weights(), elastic) < 1e-12
    opened.close()
    assert difference(elastic, load_state(config.policy)) > 1e-6


def update(backend: Backend, table: ClaimTable, config: TrainerConfig, sealed: e.StepSealed) -> None:
    scale = config.loss.scale(sealed.num_scored, int(table.totals().get("num_targets", 0)))
    apply_update(backend, table, scale, learning_rate(sealed.step, config.optimizer, config.total_steps),
                 config.optimizer.max_grad_norm)
