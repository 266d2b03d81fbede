"""The losses beside TRL's own, on random batches: `make test-trl` installs TRL apart and runs this.

TRL's number is what `GRPOTrainer._compute_loss` returns for the log-probs of a tiny Qwen2 made here (no hub, no
download); ours is `loss_gradient` over the same log-probs. Compared are the value and dL/dlogp, dL/dentropy of every target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from gyre.trainer.loss import LossConfig, Targets, loss_gradient
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

ROWS, PROMPT, LENGTH, VOCAB = 4, 3, 7, 28


@dataclass(frozen=True)
class Batch:
    """ROWS executions of one path each: sampled ids, which of them count, and what TRL and we are told of them."""

    ids_BL: torch.Tensor
    mask_BL: torch.Tensor
    advantage_B: torch.Tensor
    old_BL: torch.Tensor
    reference_BL: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        completion = slice(PROMPT, None)
        return {
            "prompt_ids": self.ids_BL[:, :PROMPT], "prompt_mask": torch.ones_like(self.ids_BL[:, :PROMPT]),
            "completion_ids": self.ids_BL[:, completion], "completion_mask": self.mask_BL, "advantages": self.advantage_B,
            "old_per_token_logps": self.old_BL, "ref_per_token_logps": self.reference_BL,
            "num_items_in_batch": self.mask_BL.sum(),
        }  # fmt: skip

    def targets(self, logprob_BL: torch.Tensor, entropy_BL: torch.Tensor) -> Targets:
        """The same batch as a record: what is masked is no target at all."""
        row_K, column_K = self.mask_BL.nonzero(as_tuple=True)
        count_B = self.mask_BL.sum(1).double()
        return Targets(
            logprob_BL[row_K, column_K], self.old_BL[row_K, column_K], self.advantage_B[row_K], (1 / count_B)[row_K], row_K,
            ROWS, entropy_BL[row_K, column_K], self.reference_BL[row_K, column_K],
        )  # fmt: skip


class OnRecord(GRPOTrainer):
    """TRL's trainer over log-probs that were taken before: leaves, whose gradient can be asked for."""

    record: tuple[torch.Tensor, torch.Tensor]

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return (*self.record, None)

    def take(self, ids_BL: torch.Tensor) -> None:
        """Log-probs and entropies of the completions, in float64 and on the graph of nothing."""
        with torch.no_grad():
            logits_BLV = self.model(ids_BL).logits[:, PROMPT - 1 : -1].double()
        logprobs_BLV = logits_BLV.log_softmax(-1)
        logprob_BL = logprobs_BLV.gather(-1, ids_BL[:, PROMPT:, None])[..., 0]
        entropy_BL = -(logprobs_BLV.exp() * logprobs_BLV).sum(-1)
        self.record = (logprob_BL.requires_grad_(True), entropy_BL.requires_grad_(True))


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., OnRecord]:
    def make(beta: float = 0.0, **options: Any) -> OnRecord:
        config = GRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, activation_checkpointing=False, report_to=[], num_generations=ROWS,
            per_device_train_batch_size=ROWS, max_completion_length=LENGTH, **options,
        )  # fmt: skip
        trainer = OnRecord(
            tiny_model(), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w2 w3 w4"]}), processing_class=tokenizer(),
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1
        trainer.beta = beta  # set here, because a trainer that is told one loads a reference model from the hub
        return trainer

    return make


def random_batch(trainer: OnRecord, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(2, VOCAB, (ROWS, PROMPT + LENGTH), generator=generator)
    lengths_B = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    mask_BL = (torch.arange(LENGTH) < lengths_B.unsqueeze(1)).long()
    trainer.take(ids_BL)

    def near() -> torch.Tensor:
        return trainer.record[0].detach() + 0.4 * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)

    advantage_B = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return Batch(ids_BL, mask_BL, advantage_B, near(), near())


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
OURS = {"clip_low": 0.2, "clip_high": 0.28}
CASES = {
    "grpo": ({"loss_type": "grpo", "epsilon": 0.2}, LossConfig(kind="grpo")),
    "dapo": ({"loss_type": "dapo", **CLIP}, LossConfig(kind="dapo")),
    "dapo, dual clip": ({"loss_type": "dapo", "delta": 1.5, **CLIP}, LossConfig(kind="dapo", dual_clip=1.5)),
    "dr_grpo": ({"loss_type": "dr_grpo", "epsilon": 0.2}, LossConfig(kind="dr_grpo", constant_length=LENGTH)),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
             LossConfig(kind="gspo", correction="none", clip_low=0.05, clip_high=0.05)),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, LossConfig(kind="cispo", clip_low=1.0, clip_high=0.28)),
    "grpo, KL": ({"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "use_bias_correction_kl": False},
                 LossConfig(kind="grpo", kl_coefficient=0.3)),
    "dapo, entropy": ({"loss_type": "dapo", "entropy_coef": 0.2, **CLIP}, LossConfig(kind="dapo", entropy_coefficient=0.2)),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_the_value_and_the_gradient_of_every_target_are_those_of_trl(
    make_trainer: Callable[..., OnRecord], case: str, seed: int
) -> None:
    options, config = CASES[case]
    trainer = make_trainer(**options)
    batch = random_batch(trainer, seed)
    logprob_BL, entropy_BL = trainer.record
    theirs = trainer._compute_loss(trainer.model, batch.inputs)
    want_BL, wanted_entropy_BL = torch.autograd.grad(theirs, trainer.record, allow_unused=True)

    output, dlogprob_K, dentropy_K = loss_gradient(batch.targets(logprob_BL, entropy_BL), config)
    scale = config.scale(ROWS, int(batch.mask_BL.sum()))
    print(f"{case}, batch {seed}: ours {output.loss.item() * scale:.12f}, TRL {theirs.item():.12f}")
    counts = batch.mask_BL.bool()
    assert output.loss.item() * scale == pytest.approx(theirs.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(dlogprob_K * scale, want_BL[counts], rtol=1e-12, atol=1e-14)
    assert not want_BL[~counts].any()
    if dentropy_K is not None:
        torch.testing.assert_close(dentropy_K * scale, wanted_entropy_BL[counts], rtol=1e-12, atol=1e-14)
