"""Models of transformers train on trees: the same loss and gradients as their own attention on every expanded path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.checkpoint import ForeignPolicy
from gyre.policy.config import UnsupportedPolicy
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.split import split
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.checkpoint import newest_checkpoint, write_checkpoint
from gyre.trainer.depth_first import DepthFirst
from gyre.trainer.loss import LossConfig, policy_loss
from gyre.trainer.runs import runs_of
from gyre.trainer.tree_forward import DenseTrees, SegmentTrees, score_targets
from gyre.trainer.tree_training import held_bytes
from trees import VOCAB, expand, random_micro_step, relative_error, targets_of

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("gyre.policy.hf")

SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {"qwen3": ("Qwen3Config", {"head_dim": 4}), "llama": ("LlamaConfig", {}), "qwen2": ("Qwen2Config", {}),
            "mistral": ("MistralConfig", {"sliding_window": None}), "olmo2": ("Olmo2Config", {})}


def network(family: str, tied: bool, seed: int = 0) -> Any:
    """A tiny model with weights large enough to matter, in float64."""
    name, fields = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**SIZES, **fields, tie_word_embeddings=tied), attn_implementation="sdpa").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def exact(model: Any) -> Any:
    """The same model with norms that keep float64: those of transformers always round to float32."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape[0], child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def expanded(model: Any, micro_step: MicroStep) -> torch.Tensor:
    """Each path by itself through the model as transformers runs it."""
    logprob: dict[int, torch.Tensor] = {}
    for path in expand(micro_step):
        ids = torch.from_numpy(micro_step.ids[path.tokens].astype(np.int64))
        scores = torch.log_softmax(model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0], -1)
        for target in path.owned:
            depth = path.tokens.index(target)
            logprob[target] = scores[depth - 1, ids[depth]]
    return torch.stack([logprob[t] for t in micro_step.target.tolist()])


def loss_and_gradients(model: Any, micro_step: MicroStep, logprob_K: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = policy_loss(targets_of(micro_step, logprob_K), LossConfig()).loss
    named = dict(model.named_parameters())
    return loss.item(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_has_the_loss_and_gradients_of_its_paths(family: str, tied: bool) -> None:
    micro_step, model = random_micro_step(3), exact(network(family, tied))
    want, want_grads = loss_and_gradients(model, micro_step, expanded(model, micro_step))
    policy = hf.TransformersModel(model)
    for attention in (DenseTrees(micro_step), SegmentTrees(runs_of(micro_step.parent))):
        scores = score_targets(policy, micro_step, attention)
        got, got_grads = loss_and_gradients(model, micro_step, scores.logprob_K)
        assert abs(got - want) <= 1e-12 * abs(want)
        assert relative_error(got_grads, want_grads) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_walked_depth_first_it_is_the_same(family: str) -> None:
    micro_step, model = random_micro_step(4), exact(network(family, tied=True))
    want, want_grads = loss_and_gradients(model, micro_step, expanded(model, micro_step))
    engine = DepthFirst(hf.TransformersModel(model), micro_step, block_tokens=5)
    logprob_K = engine.scores().logprob_K.requires_grad_()
    loss = policy_loss(targets_of(micro_step, logprob_K), LossConfig()).loss
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def add(grads: Any) -> None:
        for total, grad in zip(sums.values(), grads, strict=True):
            if grad is not None:
                total.add_(grad)

    engine.gradients(torch.autograd.grad(loss, [logprob_K])[0], list(model.parameters()), add)
    assert abs(loss.item() - want) <= 1e-12 * abs(want)
    assert relative_error(sums, want_grads) < 1e-12


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_with_checkpointed_layers_less_is_held_and_nothing_changes(family: str) -> None:
    micro_step, model = random_micro_step(6), network(family, tied=True)
    policy, attention = hf.TransformersModel(model), SegmentTrees(runs_of(micro_step.parent))
    ids, positions = (torch.from_numpy(x.astype(np.int64)) for x in (micro_step.ids, micro_step.position))
    found, sizes = [], []
    for wanted in (False, True):
        held: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, held=held: held.append(x.nbytes) or x, lambda x: x):
            hidden = policy(ids, positions, attention, layer_checkpoints=wanted)
        found.append(torch.autograd.grad(hidden.square().sum(), list(model.parameters()), allow_unused=True))
        sizes.append(sum(held))
    assert sizes[1] < sizes[0] / 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)


def relative_to(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """|got - want| / |want| over all parameters together."""
    apart = torch.stack([(got[n].double() - want[n].double()).norm() for n in want]).norm()
    return float(apart / torch.stack([want[n].double().norm() for n in want]).norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_as_they_are_in_float32_and_bfloat16(family: str) -> None:
    """Against float64: float32 within 1e-5, bfloat16 within 1.5 times the error that the expanded paths have."""
    micro_step, model = random_micro_step(5, num_trees=4, tree_tokens=60), network(family, tied=True)
    _, true_grads = loss_and_gradients(model, micro_step, expanded(model, micro_step))
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = network(family, tied=True).to(dtype)
        _, path_grads = loss_and_gradients(model, micro_step, expanded(model, micro_step).double())
        scores = score_targets(hf.TransformersModel(model), micro_step, SegmentTrees(runs_of(micro_step.parent)))
        _, tree_grads = loss_and_gradients(model, micro_step, scores.logprob_K.double())
        errors[dtype] = relative_to(tree_grads, true_grads), relative_to(path_grads, true_grads)
    assert errors[torch.float32][0] < 1e-5
    tree, paths = errors[torch.bfloat16]
    assert tree <= 1.5 * paths


@pytest.mark.parametrize("name, fields, says", [
    ("MistralConfig", {"sliding_window": 4}, "sliding_window: 4"),
    ("Gemma2Config", {"head_dim": 4}, "attn_logit_softcapping: 50.0"),
    ("MixtralConfig", {}, "num_experts: 8"),
    ("Qwen3MoeConfig", {}, "num_experts: 128"),
    ("Qwen3NextConfig", {}, "num_experts"),
    ("LlamaConfig", {"attention_dropout": 0.1}, "attention_dropout: 0.1"),
    ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "layer_types: 'sliding"),
])
def test_what_is_not_dense_full_attention_is_refused_by_name(name: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedPolicy, match=says):
        hf.check_dense(getattr(transformers, name)(**SIZES | fields))


def test_a_checkpoint_goes_in_and_out(tmp_path: Any) -> None:
    model = network("llama", tied=False).float()
    model.save_pretrained(tmp_path / "one")
    policy = hf.TransformersModel.load(tmp_path / "one", torch.float32)
    changed = {name: p.detach() + 1 for name, p in policy.named_parameters()}
    policy.save(tmp_path / "two", changed)
    again = dict(hf.TransformersModel.load(tmp_path / "two", torch.float32).named_parameters())
    assert all(torch.equal(again[name], tensor) for name, tensor in changed.items())


def test_it_trains_and_goes_through_a_checkpoint_that_transformers_loads(tmp_path: Any) -> None:
    micro_step, model = random_micro_step(3), network("llama", tied=True)
    model.save_pretrained(tmp_path / "policy")
    optimizer = OptimizerConfig(learning_rate=0.01)

    def backend(directory: Path) -> TorchBackend:
        return TorchBackend(hf.TransformersModel.load(directory, torch.float32), LossConfig(), optimizer)

    straight, first = backend(tmp_path / "policy"), backend(tmp_path / "policy")
    for trainer in (straight, first):
        trainer.accumulate(micro_step)
        trainer.update(0.25, 0.01, 1.0)
    policy = ForeignPolicy.of(tmp_path / "policy")
    state = first.weights(), first.optimizer_state()
    directory = write_checkpoint(tmp_path / "checkpoints", 1, policy, *state, {"run": "r"}, tmp_path / "policy")
    found = newest_checkpoint(tmp_path / "checkpoints")
    resumed = backend(directory)
    assert all(torch.equal(resumed.weights()[n], t) for n, t in straight.weights().items()), "as transformers loads it"
    resumed.load_weights(found.weights)
    resumed.load_optimizer_state(found.optimizer)
    for trainer in (straight, resumed):
        trainer.accumulate(micro_step)
        trainer.update(0.25, 0.01, 1.0)
    assert all(torch.equal(resumed.weights()[n], t) for n, t in straight.weights().items())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_ranks_of_fsdp_are_one(two_ranks: Any, tied: bool, tmp_path: Any) -> None:
    network("qwen3", tied).float().save_pretrained(tmp_path)
    one = TorchBackend(hf.TransformersModel.load(tmp_path, torch.float32), LossConfig(), OptimizerConfig(weight_decay=0.1))
    with two_ranks.lead("fsdp", "float32", policy=str(tmp_path)) as two:
        for step in range(3):
            for seed in (0, 1):
                micro_step = random_micro_step(2 * step + seed, num_trees=1 + 2 * seed)
                one.accumulate(micro_step)
                two.accumulate(micro_step)
            assert two.update(0.25, 0.01, 1.0) == pytest.approx(one.update(0.25, 0.01, 1.0), rel=1e-5)
        assert relative_to(two.weights(), one.weights()) < 1e-5


@pytest.mark.parametrize("way", ["checkpointed", "depth_first"])
def test_two_ranks_of_fsdp_that_cannot_hold_a_micro_step_are_one_that_can(two_ranks: Any, way: str, tmp_path: Any) -> None:
    network("qwen3", tied=True).float().save_pretrained(tmp_path)
    policy, micro_step = hf.TransformersModel.load(tmp_path, torch.float32), random_micro_step(0)
    held, largest = held_bytes(policy), max(part.num_tokens for part in split(micro_step, 2) if part is not None)
    budget = 1.0 if way == "depth_first" else largest * (held.checkpointed + held.whole / 2)
    one = TorchBackend(policy, LossConfig(), OptimizerConfig(weight_decay=0.1))
    with two_ranks.lead("fsdp", "float32", policy=str(tmp_path), memory_bytes=budget) as two:
        for _ in range(2):
            one.accumulate(micro_step)
            assert two.accumulate(micro_step)[way] == 1.0
            assert two.update(0.25, 0.01, 1.0) == pytest.approx(one.update(0.25, 0.01, 1.0), rel=1e-5)
        assert relative_to(two.weights(), one.weights()) < 1e-5
