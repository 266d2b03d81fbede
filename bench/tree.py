"""How long it takes to build, read, admit and pack one very long execution, how much memory it takes, and how it grows.

The made execution is shaped like an hours-long agent session: a main agent whose context grows to 698,500 tokens over
312 calls, sub-agents and retried calls. Compared on the same records with a dict per token, and with comparing each full
prompt to the one before it.

    python bench/tree.py [--no-dict] [--no-growth] [--repeats 5]

CPU seconds of one thread, the least of the repeats; the last line is for scripts.
"""

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gyre.contracts.events import CallRecorded, ExecutionSpec, GroupDispatched
from gyre.trajectory.admission import admit
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.core import TrajectoryCore
from gyre.trajectory.packing import Budget, Member, micro_step, pack
from gyre.trajectory.reading import Reading, read_execution
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, classifier
from gyre.trajectory.targets import Eligibility, find_targets
from gyre.trajectory.tree import build_tree
from gyre.trajectory.workload import Workload, counts, make

LONGEST = 698_500
SHAPE = Workload(turns=270, context_tokens=12_000, output_tokens=200, retries=22, sub_agents=5, sub_agent_turns=4,
                 turn_tokens=(LONGEST - 12_000) // 269 - 200)
GROWTH = (30, 100, 300, 1000)
CONFIG = TrajectoryConfig("run", "policy", 5, ROLE_ORDERS["paper"], "grpo", Budget(10**7, 10**14))


def cpu_s(action: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The least CPU time of `repeats` runs, and the last result."""
    times, result = [], None
    for _ in range(repeats):
        result = None
        gc.collect()
        started = time.process_time()
        result = action()
        times.append(time.process_time() - started)
    return min(times), result


def resolved(records: Sequence[CallRecorded]) -> CallLog:
    log = CallLog()
    for record in records:
        log.add(record)
    assert log.refusal is None, log.refusal
    return log


def built(records: Sequence[CallRecorded]) -> Any:
    """Records to tree, every digest verified."""
    return build_tree(resolved(records).ordered())


def admitted(reading: Reading) -> Member:
    admission = admit(reading.tree, reading.targets, reading.leaf_roles(), CONFIG.role_order, CONFIG.max_paths, ("run", "x"))
    return Member("x", 1.0, reading.tree, reading.targets, admission)


def everything(records: Sequence[CallRecorded]) -> Member:
    return admitted(read_execution(resolved(records).ordered(), Eligibility(), classifier("any")))


def packed(member: Member) -> list[bytes]:
    packs = pack([member], CONFIG.budget)
    return [micro_step("g", n, p, [member]).to_bytes() for n, p in enumerate(packs)]


def peak_bytes(records: Sequence[CallRecorded]) -> int:
    """The most that is held at once, from records to admission: the records' own arrays and all that is made of them."""
    held = sum(a.nbytes for r in records for a in (r.prompt_delta, r.output_ids, r.logprobs, r.behaviour_logprobs))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    everything(records)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return held + peak - before


def restart(records: Sequence[CallRecorded]) -> tuple[Callable[[], Any], int]:
    """What a restarted process does with an execution of these records that is still open, and the bytes it reads."""
    core = TrajectoryCore(CONFIG)
    state = core.initial()
    one = ExecutionSpec(records[0].execution, 0, 1.0, 2.0)
    core.step(state, GroupDispatched(records[0].group, 0, "q", "t", "train", 0, (one,)), 0.0)
    for record in records:
        core.step(state, record, 0.0)
    kept, snapshot = core.take_kept(state), core.snapshot(state)

    def restore() -> None:
        again = core.restore(snapshot)
        for name, data in kept.rows:
            core.recall(again, name, data)
        assert len(again.groups[one.execution.rpartition("-")[0]].executions[one.execution].log.calls) == len(records)

    return restore, len(snapshot) + sum(len(data) for _, data in kept.rows)


def sequences(records: Sequence[CallRecorded]) -> list[np.ndarray]:
    """Prompt plus output of every call, written out."""
    found: dict[str, np.ndarray] = {}
    for r in records:
        kept = found[r.base_call][:r.keep_len] if r.base_call else np.empty(0, np.int32)
        found[r.call] = np.concatenate((kept, r.prompt_delta, r.output_ids))
    return list(found.values())


def dict_trie(written: Iterator[np.ndarray]) -> int:
    """The naive way: one dict per token. Returns the number of nodes."""
    root: dict[int, Any] = {}
    num = 0
    for sequence in written:
        node = root
        for token in sequence.tolist():
            child = node.get(token)
            if child is None:
                child = node[token] = {}
                num += 1
            node = child
    return num


def neighbour_prefixes(written: list[np.ndarray]) -> int:
    """Full prompts, each compared with the one before: tokens not shared with it."""
    total = len(written[0])
    for one, other in zip(written, written[1:], strict=False):
        num = min(len(one), len(other))
        differs = one[:num] != other[:num]
        total += len(other) - (int(differs.argmax()) if differs.any() else num)
    return total


def show_memory_and_restart(records: Sequence[CallRecorded], unique: int, repeats: int) -> float:
    """Returns the peak, bytes per unique token."""
    restore, num_bytes = restart(records)
    restart_s, _ = cpu_s(restore, repeats)
    print(f"restart while it is open: {restart_s:.4f} s for {num_bytes:,} bytes")
    peak = peak_bytes(records) / unique
    print(f"peak memory from records to admission: {peak:.2f} bytes per unique token, {peak / 4:.2f} times the tokens")
    return peak


def show_baselines(records: Sequence[CallRecorded], build_s: float, unique: int, with_dict: bool) -> None:
    written = sequences(records)
    lcp_s, num = cpu_s(lambda: neighbour_prefixes(written), 2)
    print(f"full prompts against their neighbour: {lcp_s:.3f} s, {lcp_s / build_s:.1f} times the build, without digests "
          f"({num:,} tokens, {num / unique:.2f} times the unique)")
    if with_dict:
        dict_s, num = cpu_s(lambda: dict_trie(iter(written)), 1)
        print(f"dict per token: {dict_s:.2f} s, {dict_s / build_s:.0f} times the build ({num:,} nodes)")


def show_growth(repeats: int) -> None:
    """Time and memory per unit of size; a column that grows says that something is not linear."""
    columns = (("calls", 6), ("unique", 10), ("flat", 13), ("build ms", 9), ("all ms", 8), ("us/(call + 1000 unique)", 24),
               ("bytes/unique", 13))
    print(" ".join(f"{name:>{width}}" for name, width in columns))
    for num_calls in GROWTH:
        turns = num_calls * 270 // 312
        shape = replace(SHAPE, turns=turns, retries=num_calls * 22 // 312, sub_agents=max(1, num_calls * 5 // 312))
        shape = replace(shape, turns=turns + num_calls - counts(shape).num_calls)
        records, expected = make(shape).records, counts(shape)
        build_s, _ = cpu_s(lambda records=records: built(records), repeats)
        all_s, _ = cpu_s(lambda records=records: everything(records), repeats)
        per_size = 1e6 * all_s / (expected.num_calls + expected.unique / 1000)
        print(f"{expected.num_calls:>6} {expected.unique:>10,} {expected.flat:>13,} {1000 * build_s:>9.1f} "
              f"{1000 * all_s:>8.1f} {per_size:>24.1f} {peak_bytes(records) / expected.unique:>13.2f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--no-dict", action="store_true", help="leave out the dict trie (it takes gigabytes)")
    arguments.add_argument("--no-growth", action="store_true", help="leave out 30, 100, 300 and 1,000 calls")
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    records, expected = make(SHAPE).records, counts(SHAPE)
    build_s, tree = cpu_s(lambda: built(records), options.repeats)
    roles_s, roles = cpu_s(lambda: classifier("any").classify(tree.calls), options.repeats)
    targets_s, targets = cpu_s(lambda: find_targets(tree, Eligibility()), options.repeats)
    admit_s, member = cpu_s(lambda: admitted(Reading(tree, roles, targets)), options.repeats)
    pack_s, steps = cpu_s(lambda: packed(member), options.repeats)
    unique, flat = tree.num_tokens, tree.num_flat_tokens
    assert (unique, flat, len(records), targets.num_drawn) == (
        expected.unique, expected.flat, expected.num_calls, expected.drawn), "the tree is not the one that was made"
    print(f"execution: {len(records)} calls, longest prompt {max(r.prompt_len for r in records):,}, "
          f"{flat:,} flat, {unique:,} unique ({flat / unique:.0f}x), {tree.num_segments} segments")
    print(f"records to tree, digests verified: {build_s:.4f} s   roles: {roles_s:.4f} s   targets: {targets_s:.4f} s "
          f"({len(targets):,})   admission: {admit_s:.4f} s ({member.admission.num_owned:,} owned)   "
          f"packing: {pack_s:.4f} s ({sum(map(len, steps)):,} bytes)   "
          f"together: {build_s + roles_s + targets_s + admit_s + pack_s:.4f} s")
    peak = show_memory_and_restart(records, unique, options.repeats)
    show_baselines(records, build_s, unique, not options.no_dict)
    if not options.no_growth:
        show_growth(options.repeats)
    print(f"tree build_s={build_s:.4f} admit_s={roles_s + targets_s + admit_s:.4f} bytes_per_unique={peak:.2f} "
          f"unique={unique} flat={flat}")


if __name__ == "__main__":
    main()
