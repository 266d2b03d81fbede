"""Training on a tree against training on its paths one by one, and against one sample per call.

Two shapes at 4,096 and 16,384 unique tokens: an agent's execution (a trunk, stripped thoughts, compaction, sub-agents,
retries) and a bushy one (one long prefix, many answers). For each: CPU seconds of forward and backward, the bounds that
sharing sets (tokens, visible pairs, FLOPs), the share of the FLOPs bound that is reached, and what is held for backward.
At 65,536 tokens the tree is measured alone; what its paths and calls would take is computed from their FLOPs.

    python bench/tree_train.py [--sizes 4096 16384] [--alone 65536] [--rounds 2] [--no-transformers]

One thread, one layer. A round runs the tree several times, between pieces of its paths and of its calls, so that all of
them meet the same machine; its ratio is CPU seconds of all paths over the mean of the tree's passes, and the median
round counts (the range of all is printed). A ratio above its bound says that the measurement is broken, and is reported
so. The last line is for scripts.
"""

import argparse
import resource
import statistics
import sys
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
PACK_TOKENS = 3072  # passes of 8,192 tokens were up to a tenth slower, one sequence at a time is no faster
TREE_PASSES = 3  # in one round
# Heads of 64, as models have them. With heads of 32 the softmax outweighs the products: attention's FLOPs take almost twice
# as long as the others', in short sequences longer than on a tree (22.5 and 26 GFLOP/s), and a bushy tree of 4,096 tokens
# exceeds its bound in FLOPs.
SHAPE = PolicyConfig("qwen3", VOCAB, 256, 768, 1, 4, 2, 64, tie_word_embeddings=True, qk_norm=True, max_position=1 << 20)


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
    per_turn = size // (turns + 15)
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
    """One prefix and `leaves` sampled answers of `leaf` tokens."""
    parents = list(range(-1, prefix - 1))
    for _ in range(leaves):
        first = len(parents)
        parents += [prefix - 1, *range(first, first + leaf - 1)]
    parent = np.array(parents, np.int32)
    index = np.arange(len(parent))
    place = np.maximum(index - prefix, 0)
    position = np.where(index < prefix, index, prefix + place % leaf).astype(np.int32)
    exits = np.where(index < prefix, len(parent), prefix + (place // leaf + 1) * leaf).astype(np.int32)
    target = np.arange(prefix, len(parent), dtype=np.int32)
    num = len(target)
    step = MicroStep(
        "m", "g", ("x",), np.ones(1, np.float32), index.astype(np.int32), parent, position, exits,
        np.zeros(len(parent), np.int32), target, np.repeat(np.arange(leaves), leaf).astype(np.int32),
        np.full(num, -6.0, np.float32), np.zeros(num, np.int32), np.full(num, 1 / num, np.float32))
    return with_paths("bushy", step, [(prefix + leaf, leaf)] * leaves)


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

Action = Callable[[], object]
Sequences = list[tuple[np.ndarray, np.ndarray]]  # ids and depths of targets, of each


def train_tree(model: Decoder, case: Case) -> None:
    scores = score_targets(model, case.micro_step, choose_attention(case.micro_step))
    torch.autograd.grad(scores.logprob_K.sum(), list(model.parameters()))


def paths_of(case: Case) -> Sequences:
    step = case.micro_step
    return [(step.ids[tokens], step.position[step.target[mine]])
            for tokens, mine in zip(case.paths, case.owned, strict=True)]


def calls_of(case: Case) -> Sequences:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, VOCAB, length), np.arange(length - num, length)) for length, num in case.calls]


def packed(model: Decoder, sequences: Sequences) -> list[Action]:
    """Passes that train separate sequences; those of like length share one of up to PACK_TOKENS."""
    packs: list[Sequences] = []
    for one in sorted(sequences, key=lambda s: -len(s[0])):
        longest = len(packs[-1][0][0]) if packs else 0
        if not packs or (len(packs[-1]) + 1) * longest > PACK_TOKENS or len(one[0]) < 0.9 * longest:
            packs.append([])
        packs[-1].append(one)
    return [lambda pack_=pack_: train_pack(model, pack_) for pack_ in packs]


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


def cpu_s(action: Action) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


@dataclass(frozen=True)
class Round:
    """CPU seconds: one pass over the tree (the mean of several), all paths, all calls."""

    tree: float
    paths: float
    calls: float


def measure(model: Decoder, case: Case) -> Round:
    """One round: the passes over the tree stand at even distances between those over paths and calls."""
    pieces = [("paths", p) for p in packed(model, paths_of(case))] + [("calls", c) for c in packed(model, calls_of(case))]
    order = sorted(range(len(pieces)), key=lambda n: n * 0.618034 % 1.0)  # both kinds all along the round
    found: dict[str, list[float]] = {"tree": [], "paths": [], "calls": []}
    for place, number in enumerate(order):
        while len(found["tree"]) <= place * TREE_PASSES // len(order):
            found["tree"].append(cpu_s(lambda: train_tree(model, case)))
        name, action = pieces[number]
        found[name].append(cpu_s(action))
    return Round(statistics.mean(found["tree"]), sum(found["paths"]), sum(found["calls"]))


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


@dataclass(frozen=True)
class Costs:
    """FLOPs of a case by its three ways, and by how much tokens and pairs shrink on the tree."""

    tree: float
    paths: float
    calls: float
    shrink: str

    @classmethod
    def of(cls, case: Case) -> "Costs":
        step, paths = case.micro_step, expanded_depths(case)
        shrink = (f"{sum(map(len, paths)) / step.num_tokens:.2f}x in tokens, "
                  f"{pairs_of(paths) / pairs_of([step.position]):.2f}x in pairs")
        return cls(flops([step.position], step.num_targets), flops(paths, step.num_targets),
                   flops(call_depths(case), sum(num for _, num in case.calls)), shrink)


@dataclass(frozen=True)
class Found:
    """The speed-up over the paths, its bound, and the FLOPs per second of the paths."""

    speedup: float
    bound: float
    rate: float


def against(ratios: list[float], bound: float) -> str:
    broken = "  BROKEN: above its bound" if statistics.median(ratios) > bound else ""
    return (f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) of at most {bound:.2f}x in FLOPs, "
            f"share {statistics.median(ratios) / bound:.2f}{broken}")


def show(case: Case, model: Decoder, rounds: int) -> Found:
    """Measure one case."""
    costs, step = Costs.of(case), case.micro_step
    times = [measure(model, case) for _ in range(rounds)]
    tree, paths, calls = (statistics.median(getattr(t, name) for t in times) for name in ("tree", "paths", "calls"))
    over_paths, over_calls = [t.paths / t.tree for t in times], [t.calls / t.tree for t in times]
    held = Held(model).during(lambda: train_tree(model, case))
    print(f"{case.name} {step.num_tokens:,} tokens, {len(case.paths)} paths, {len(case.calls)} calls: {costs.shrink}")
    print(f"    CPU seconds: tree {tree:.2f}, paths {paths:.2f}, per call {calls:.2f}; GFLOP/s: "
          f"{costs.tree / tree / 1e9:.1f}, {costs.paths / paths / 1e9:.1f}, {costs.calls / calls / 1e9:.1f}")
    print(f"    over its paths {against(over_paths, costs.paths / costs.tree)}")
    print(f"    over its calls {against(over_calls, costs.calls / costs.tree)}")
    print(f"    held for backward {held / 2**20:.0f} MiB", flush=True)
    return Found(statistics.median(over_paths), costs.paths / costs.tree, costs.paths / paths)


def show_alone(case: Case, model: Decoder, rate: float, at: str) -> None:
    """One pass over a tree whose paths would take too long; `rate`: FLOPs per second of the paths of case `at`."""
    costs, step, held = Costs.of(case), case.micro_step, Held(model)
    took: list[float] = []
    peak = held.during(lambda: took.append(cpu_s(lambda: train_tree(model, case))))
    paths, calls = costs.paths / rate, costs.calls / rate
    print(f"{case.name} {step.num_tokens:,} tokens, {len(case.paths)} paths, {len(case.calls)} calls: {costs.shrink}, "
          f"{costs.paths / costs.tree:.2f}x in FLOPs, {costs.calls / costs.tree:.2f}x per call")
    print(f"    tree alone {took[0]:.1f} CPU seconds at {costs.tree / took[0] / 1e9:.1f} GFLOP/s; held for backward "
          f"{peak / 2**20:.0f} MiB")
    print(f"    computed, not measured, at {rate / 1e9:.1f} GFLOP/s of {at}: paths {paths:.0f} s, {paths / took[0]:.2f}x; "
          f"per call {calls:.0f} s, {calls / took[0]:.2f}x", flush=True)


def show_memory(model: Decoder) -> None:
    """Depth first: what is held does not follow the number of leaves."""
    peaks = []
    for leaves in (4, 16, 64):
        case = bushy_of(prefix=1024, leaves=leaves, leaf=256)
        held, engines = Held(model), []
        peak = held.during(lambda case=case, engines=engines: engines.append(walk_depth_first(model, case)))
        path = engines[0].path_bytes
        peaks.append(peak + path)
        whole = Held(model).during(lambda case=case: train_tree(model, case))
        print(f"depth first, {leaves:>2} leaves of 256 behind 1,024: {peak / 2**20:.1f} MiB for one block and "
              f"{path / 2**20:.1f} MiB for one path, against {whole / 2**20:.1f} MiB in a single pass")
    growth = peaks[-1] / peaks[0]
    verdict = "flat" if growth < 1.05 else "NOT FLAT"
    print(f"depth first, memory of 64 leaves over that of 4: {growth:.2f}x, {verdict}", flush=True)


def show_transformers(model: Decoder, rounds: int) -> None:
    """The baseline itself: one sequence through our decoder and through transformers with SDPA."""
    import transformers

    config = transformers.Qwen3Config(**{k: v for k, v in SHAPE.to_hf().items() if k != "torch_dtype"})
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for length in (1024, 4096):
        ids, num = torch.arange(length) % VOCAB, length // 4

        def theirs(ids: torch.Tensor = ids, num: int = num) -> None:
            hidden = other.model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]
            logprobs = torch.log_softmax(other.lm_head(hidden[:num]), -1)
            torch.autograd.grad(logprobs.gather(1, ids[1:num + 1, None]).sum(), list(other.parameters()))

        def ours(ids: torch.Tensor = ids, num: int = num) -> None:
            train_pack(model, [(ids.numpy(), np.arange(1, num + 1))])

        ours(), theirs()
        times = [(cpu_s(ours), cpu_s(theirs)) for _ in range(3 * rounds)]
        ratio = statistics.median(mine / other_s for mine, other_s in times)
        work = flops([np.arange(length)], num) / 1e9
        mine, other_s = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"baseline: one path of {length:,} tokens at {work / mine:.1f} GFLOP/s, through transformers with SDPA at "
              f"{work / other_s:.1f}: {ratio:.2f}x its seconds per FLOP"
              f"{'' if ratio <= 1.1 else '  BROKEN: more than 10 % behind'}", flush=True)


def cases_of(size: int) -> tuple[Case, Case]:
    return agent_case(size), bushy_of(size // 4, 16, size * 3 // 64)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sizes", type=int, nargs="+", default=[4096, 16384])
    arguments.add_argument("--alone", type=int, nargs="*", default=[65536])
    arguments.add_argument("--rounds", type=int, default=2, help="half of those up to 4,096 tokens")
    arguments.add_argument("--no-transformers", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    model = Decoder.create(SHAPE, 0)
    if not options.no_transformers:
        show_transformers(model, options.rounds)
    show_memory(model)
    found: dict[str, tuple[Found, str]] = {}
    for size in options.sizes:
        for case in cases_of(size):
            rounds = options.rounds * (2 if size <= 4096 else 1)
            found[case.name] = show(case, model, rounds), f"its paths at {case.micro_step.num_tokens:,} tokens"
    for size in options.alone:
        for case in cases_of(size):
            show_alone(case, model, found[case.name][0].rate, found[case.name][1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"peak resident memory of this process {peak / 2**30:.2f} GiB; {time.process_time():.0f} CPU seconds in all")
    agent = found["agent"][0]  # at the largest size of `sizes`
    print(f"tree_train speedup={agent.speedup:.2f} flops_bound={agent.bound:.2f} share={agent.speedup / agent.bound:.2f}")


if __name__ == "__main__":
    main()
