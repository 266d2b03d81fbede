"""TRL's GRPO trainer on given rows: run by .venv-trl's Python, which knows nothing of ours.

    python trl_side.py JOB.json

JOB: {"model": HF directory, "scratch": directory, "micro_steps": {shape: [[{"ids": ..., "owned": ...}, ...], ...]}}.
For every line of input, a shape: one step (all its micro-steps, one update); answers with a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

ROWS = 8

class OnRows(GRPOTrainer):
    """Trains what it is given instead of generating it."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs


def trainer_of(job: dict[str, Any], num_rows: int) -> OnRows:
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, model.config.vocab_size)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    config = GRPOConfig(
        job["scratch"], use_cpu=True, bf16=False, activation_checkpointing=False, report_to=[], num_generations=num_rows,
        per_device_train_batch_size=num_rows, max_completion_length=8192, learning_rate=1e-4, beta=0.0,
    )  # fmt: skip
    trainer = OnRows(
        model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3"]}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    trainer.model.train()
    return trainer


def alike(rows: list[dict[str, list[int]]]) -> list[list[dict[str, list[int]]]]:
    """Rows of similar length together, so that little of what TRL computes is padding."""
    ordered = sorted(rows, key=lambda row: (row["owned"][:1] or [0], len(row["ids"])))
    return [ordered[at : at + ROWS] for at in range(0, len(ordered), ROWS)]


def batch_of(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """As TRL lays rows out: prompts padded on the left, completions on the right; what is not owned is masked."""
    firsts = [row["owned"][0] if row["owned"] else len(row["ids"]) - 1 for row in rows]
    left, right = max(firsts), max(len(row["ids"]) - first for row, first in zip(rows, firsts, strict=True))
    made = {name: torch.zeros(len(rows), width, dtype=torch.long) for name, width in (
        ("prompt_ids", left), ("prompt_mask", left), ("completion_ids", right), ("completion_mask", right),
        ("tool_mask", right))}  # fmt: skip
    for i, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        after = len(row["ids"]) - first
        made["prompt_ids"][i, left - first :] = torch.tensor(row["ids"][:first])
        made["prompt_mask"][i, left - first :] = 1
        made["completion_ids"][i, :after] = torch.tensor(row["ids"][first:])
        made["completion_mask"][i, :after] = 1
        made["tool_mask"][i, [t - first for t in row["owned"]]] = 1
    old = torch.full((len(rows), right), -5.0)
    counted = (made["completion_mask"] * made["tool_mask"]).sum()
    return {**made, "advantages": torch.randn(len(rows)), "old_per_token_logps": old, "num_items_in_batch": counted}


def step(trainer: OnRows, batches: list[dict[str, Any]]) -> float:
    """CPU seconds of one update over all micro-steps."""
    started = time.process_time()
    for batch in batches:
        trainer.training_step(trainer.model, batch, batch["num_items_in_batch"])
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return time.process_time() - started


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    batches = {
        shape: [batch_of(rows) for micro_step in micro_steps for rows in alike(micro_step)]
        for shape, micro_steps in job["micro_steps"].items()
    }  # fmt: skip
    trainer = trainer_of(job, 2)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        shape = line.strip()
        processed = sum(b["prompt_ids"].numel() + b["completion_ids"].numel() for b in batches[shape])
        print(json.dumps({"cpu_s": step(trainer, batches[shape]), "processed": processed}), flush=True)


if __name__ == "__main__":
    main()
