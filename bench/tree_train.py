"""Training on a tree against training on its paths one by one, and against one sample per call.

Two shapes at 4,096 and 16,384 unique tokens: an agent's execution (a trunk, stripped thoughts, compaction, sub-agents,
retries) and a bushy one (one long prefix, many answers). For each: CPU seconds of forward and backward, the bounds that
sharing sets (tokens, visible pairs, FLOPs), the share of the FLOPs bound that is reached, and what is held for backward.

    python bench/tree_train.py [--sizes 4096 16384] [--repeats 2] [--no-transformers]

One thread; the three ways are interleaved and the least CPU time of the repeats counts. A ratio above its bound says
that the measurement is broken, and is reported so. The last line is for scripts.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.attention import CausalAttention
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.trainer.depth_first import DepthFirst
from gyre.trainer.flash_trees import FlashTrees, has_kernel
from gyre.trainer.runs import Run
from gyre.trainer.tree_forward import choose_attention, score_rows, score_targets
from gyre.trajectory.admission import admit
from gyre.trajectory.packing import Budget, Member, micro_step, pack
from gyre.trajectory.reading import Reading, read_execution
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, classifier
from gyre.trajectory.targets import Eligibility
from gyre.trajectory.workload import Workload, make

VOCAB = 512
PACK_TOKENS = 8192
SHAPE = PolicyConfig("qwen3", VOCAB, 128, 384, 2, 4, 2, 32, tie_word_embeddings=True, qk_norm=True, max_position=1 << 20)


@dataclass(frozen=True)
class Case:
    """A tree to train, the same thing as separate paths, and the lengths of its calls."""

    name: str
    micro_step: MicroStep
    paths: tuple[np.ndarray, ...]  # token indices from the root to the last target of each admitted path
    owned: tuple[np.ndarray, ...]  # numbers of the targets that each path owns
    calls: tuple[tuple[int, int], ...]  # (prompt + output, targets) of every call


def agent_case(size: int) -> Case:
    """An execution of about `size` unique tokens."""
    turns = 24
    per_turn = size // (turns + 10)
    workload = Workload(turns, context_tokens=2 * per_turn, turn_tokens=per_turn * 3 // 4, output_tokens=per_turn // 4,
                        strip_thinking=per_turn // 16, compactions=1, sub_agents=2, sub_agent_turns=3, retries=3,
                        task_tokens=per_turn // 2)
    log = CallLog()
    for record in make(workload).records:
        log.add(record)
    reading = read_execution(log.ordered(), Eligibility(), classifier("any"))
    return case_of("agent", reading, [(c.length, len(c.record.output_ids)) for c in log.ordered()])


def case_of(name: str, reading: Reading, calls: list[tuple[int, int]]) -> Case:
    admission = admit(reading.tree, reading.targets, reading.leaf_roles(), ROLE_ORDERS["paper"], 0, ("bench", name))
    member = Member(name, 1.0, reading.tree, reading.targets, admission)
    (whole,) = pack([member], Budget(1 << 30, 1 << 60))
    return with_paths(name, micro_step("g", 0, whole, [member]), calls)


def bushy_of(prefix: int, leaves: int, leaf: int) -> Case:
    """One prefix and `leaves` answers of `leaf` tokens, the first half of each sampled."""
    parents = list(range(-1, prefix - 1))
    for _ in range(leaves):
        first = len(parents)
        parents += [prefix - 1, *range(first, first + leaf - 1)]
    parent = np.array(parents, np.int32)
    index = np.arange(len(parent))
    place = np.maximum(index - prefix, 0)
    position = np.where(index < prefix, index, prefix + place % leaf).astype(np.int32)
    exits = np.where(index < prefix, len(parent), prefix + (place // leaf + 1) * leaf).astype(np.int32)
    half = leaf // 2
    target = (prefix + leaf * np.arange(leaves)[:, None] + np.arange(half)).reshape(-1).astype(np.int32)
    num = len(target)
    step = MicroStep(
        "m", "g", ("x",), np.ones(1, np.float32), index.astype(np.int32), parent, position, exits,
        np.zeros(len(parent), np.int32), target, np.repeat(np.arange(leaves), half).astype(np.int32),
        np.full(num, -6.0, np.float32), np.zeros(num, np.int32), np.full(num, 1 / num, np.float32))
    return with_paths("bushy", step, [(prefix + half, half)] * leaves)


def with_paths(name: str, step: MicroStep, calls: list[tuple[int, int]]) -> Case:
    """Spell out each path of a micro-step, whose ids are brought into the vocabulary."""
    object.__setattr__(step, "ids", step.ids % VOCAB)
    paths, owned = [], []
    for number in range(int(step.path.max()) + 1):
        mine = np.flatnonzero(step.path == number)
        token, tokens = int(step.target[mine[-1]]), []
        while token >= 0:
            tokens.append(token)
            token = int(step.parent[token])
        paths.append(np.array(tokens[::-1]))
        owned.append(mine)
    return Case(name, step, tuple(paths), tuple(owned), tuple(calls))


# ---------------------------------------------------------------- the three ways


def train_tree(model: Decoder, case: Case) -> None:
    scores = score_targets(model, case.micro_step, choose_attention(case.micro_step))
    torch.autograd.grad(scores.logprob_K.sum(), list(model.parameters()))


def train_paths(model: Decoder, case: Case) -> None:
    step = case.micro_step
    train_packed(model, [(step.ids[tokens], step.position[step.target[mine]])
                         for tokens, mine in zip(case.paths, case.owned, strict=True)])


def train_calls(model: Decoder, case: Case) -> None:
    rng = np.random.default_rng(0)
    train_packed(model, [(rng.integers(0, VOCAB, length), np.arange(length - num, length)) for length, num in case.calls])


def train_packed(model: Decoder, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Separate sequences (ids, depths of targets); those of like length share a pass of up to PACK_TOKENS."""
    pack_: list[tuple[np.ndarray, np.ndarray]] = []
    for one in sorted(sequences, key=lambda s: -len(s[0])):
        if pack_ and (len(pack_) + 1) * len(pack_[0][0]) > PACK_TOKENS or pack_ and len(one[0]) < 0.9 * len(pack_[0][0]):
            train_pack(model, pack_)
            pack_ = []
        pack_.append(one)
    train_pack(model, pack_)


def train_pack(model: Decoder, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    lengths = [len(ids) for ids, _ in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    ids_T = torch.from_numpy(np.concatenate([ids for ids, _ in sequences]).astype(np.int64))
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    target_K = torch.from_numpy(np.concatenate([a + d for a, (_, d) in zip(starts, sequences, strict=True)]).astype(np.int64))
    # The same kernels as on the tree, which beat one padded call with grouped heads: the strongest baseline at hand.
    runs = [Run(int(a), int(a) + n, ()) for a, n in zip(starts, lengths, strict=True)]
    attention = FlashTrees(runs) if has_kernel("cpu") else CausalAttention(lengths)
    hidden_TE = model(ids_T, positions_T, attention)
    logprob_K, _ = score_rows(model, hidden_TE[target_K - 1], ids_T[target_K], 1.0)
    torch.autograd.grad(logprob_K.sum(), list(model.parameters()))


def walk_depth_first(model: Decoder, case: Case) -> DepthFirst:
    engine = DepthFirst(model, case.micro_step, block_tokens=512)
    engine.scores()
    engine.gradients(torch.ones(case.micro_step.num_targets), list(model.parameters()), lambda grads: None)
    return engine


# ---------------------------------------------------------------- what it should cost


def flops(depths: Sequence[np.ndarray], num_targets: int) -> float:
    """Forward and backward of tokens at these depths: projections, visible pairs, and logits at targets."""
    linear = 2 * sum(p.numel() for n, p in Decoder(SHAPE).named_parameters() if "embed" not in n)
    pair = 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim
    tokens = sum(len(d) for d in depths)
    return 3 * (linear * tokens + pair * pairs_of(depths) + 2 * SHAPE.hidden_size * VOCAB * num_targets)


def pairs_of(depths: Sequence[np.ndarray]) -> float:
    return float(sum(d.sum(dtype=np.int64) + len(d) for d in depths))


def expanded_depths(case: Case) -> list[np.ndarray]:
    return [np.arange(len(p)) for p in case.paths]


def call_depths(case: Case) -> list[np.ndarray]:
    return [np.arange(length) for length, _ in case.calls]


# ---------------------------------------------------------------- measuring


def cpu_s(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


class Held:
    """The most bytes that are held for backward at once, parameters aside: counted, not sampled."""

    def __init__(self, model: Decoder) -> None:
        self.now = self.peak = 0
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._uses: dict[int, int] = {}

    def during(self, action: Callable[[], object]) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            action()
        return self.peak

    def _pack(self, tensor: torch.Tensor) -> "_Kept":
        return _Kept(self, tensor)

    def change(self, key: int, size: int, by: int) -> None:
        if key in self._own:
            return
        before = self._uses.get(key, 0)
        self._uses[key] = before + by
        if 0 in (before, before + by):
            self.now += size * by
            self.peak = max(self.peak, self.now)


class _Kept:
    def __init__(self, held: Held, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.held, self.tensor, self.key, self.size = held, tensor.detach(), storage.data_ptr(), storage.nbytes()
        held.change(self.key, self.size, 1)

    def __del__(self) -> None:
        self.held.change(self.key, self.size, -1)


def show(case: Case, model: Decoder, repeats: int, with_calls: bool) -> tuple[float, float]:
    """Measure one case; returns speed-up over its paths and the FLOPs bound."""
    step = case.micro_step
    ways: dict[str, Callable[[], object]] = {"tree": lambda: train_tree(model, case), "paths": lambda: train_paths(model, case)}
    if with_calls:
        ways["calls"] = lambda: train_calls(model, case)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats):
        for name in (ways if number % 2 == 0 else reversed(ways)):
            found[name].append(cpu_s(ways[name]))
    least = {name: min(times) for name, times in found.items()}
    expanded, tree_cost = expanded_depths(case), flops([step.position], step.num_targets)
    bound = flops(expanded, step.num_targets) / tree_cost
    speedup = least["paths"] / least["tree"]
    per_call = flops(call_depths(case), sum(n for _, n in case.calls)) / tree_cost
    measured = f"{least['calls'] / least['tree']:.1f}x measured, " if with_calls else ""
    broken = "  BROKEN: above its bound" if speedup > bound * 1.02 else ""
    print(f"{case.name:>6} {step.num_tokens:>6,} tokens, {len(case.paths)} paths: tree {least['tree']:.2f} s, "
          f"paths {least['paths']:.2f} s: "
          f"{speedup:.2f}x of at most {bound:.2f}x in FLOPs ({sum(map(len, expanded)) / step.num_tokens:.2f}x tokens, "
          f"{pairs_of(expanded) / pairs_of([step.position]):.2f}x pairs): share {speedup / bound:.2f}{broken}")
    whole = Held(model).during(lambda: train_tree(model, case))
    print(f"       per call {measured}{per_call:.1f}x by FLOPs; {tree_cost / least['tree'] / 1e9:.1f} GFLOP/s on the tree; "
          f"held for backward {whole / 2**20:.0f} MiB")
    return speedup, bound


def show_memory(model: Decoder) -> None:
    """Depth first: what is held does not follow the number of leaves."""
    for leaves in (4, 16, 64):
        case = bushy_of(prefix=1024, leaves=leaves, leaf=256)
        held, engines = Held(model), []
        peak = held.during(lambda case=case, engines=engines: engines.append(walk_depth_first(model, case)))
        path = engines[0].path_bytes
        whole = Held(model).during(lambda case=case: train_tree(model, case))
        print(f"depth first, {leaves:>2} leaves of 256 behind 1,024: {peak / 2**20:.1f} MiB for one block and "
              f"{path / 2**20:.1f} MiB for one path, against {whole / 2**20:.1f} MiB in a single pass")


def show_transformers(model: Decoder, repeats: int) -> None:
    """The baseline itself: one sequence through our decoder and through transformers with SDPA."""
    import transformers

    config = transformers.Qwen3Config(**{k: v for k, v in SHAPE.to_hf().items() if k != "torch_dtype"})
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    ids = torch.arange(4096) % VOCAB

    def theirs() -> None:
        hidden = other.model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]
        logprobs = torch.log_softmax(other.lm_head(hidden[:1024]), -1)
        torch.autograd.grad(logprobs.gather(1, ids[1:1025, None]).sum(), list(other.parameters()))

    def ours() -> None:
        train_pack(model, [(ids.numpy(), np.arange(1, 1025))])

    times = [(cpu_s(ours), cpu_s(theirs)) for _ in range(repeats + 1)]
    mine, other_s = (min(column) for column in zip(*times, strict=True))
    print(f"baseline: one path of 4,096 tokens {mine:.2f} s, through transformers with SDPA {other_s:.2f} s: "
          f"{mine / other_s:.2f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sizes", type=int, nargs="+", default=[4096, 16384])
    arguments.add_argument("--repeats", type=int, default=2)
    arguments.add_argument("--no-transformers", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    model = Decoder.create(SHAPE, 0)
    if not options.no_transformers:
        show_transformers(model, options.repeats)
    show_memory(model)
    found = []
    for size in options.sizes:
        for case in (agent_case(size), bushy_of(size // 4, 16, size * 3 // 64)):
            found.append(show(case, model, options.repeats if size <= 4096 else 1, with_calls=size <= 4096))
    speedup, bound = found[-2]  # the agent's execution at the largest size
    print(f"tree_train speedup={speedup:.2f} flops_bound={bound:.2f} share={speedup / bound:.2f}")


if __name__ == "__main__":
    main()
