"""How long it takes to build, admit and pack one very long execution, and how much memory its tree takes.

The generated execution is shaped like an hours-long agent session: a main agent whose context grows, is compacted and
grows again, with summaries, sub-agents, retries and stripped reasoning in between. Compared with a dict per token and
with comparing each full prompt to the one before it.

    python bench/tree.py [--calls 312] [--longest 698500] [--no-dict]

CPU seconds of one thread; the last line is for scripts.
"""

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gyre.contracts.digest import token_digest
from gyre.contracts.events import CallRecorded, RoleClass, VersionSpan
from gyre.trajectory.admission import admit
from gyre.trajectory.packing import Budget, Member, micro_step, pack
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, RecordedRoles, leaf_roles
from gyre.trajectory.targets import find_targets
from gyre.trajectory.tree import Tree, build_tree


class Session:
    """Generates the records of one execution."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.records: list[CallRecorded] = []
        self.sequences: dict[str, np.ndarray] = {}

    def ids(self, num: int) -> np.ndarray:
        return self._rng.integers(1000, 150_000, num, dtype=np.int32)

    def call(self, base: str | None, keep: int, delta: int, output: int, role: RoleClass) -> str:
        """Record a call that keeps `keep` tokens of `base` and adds `delta` of context and `output` sampled ones."""
        name = f"c{len(self.records):04d}"
        new, out = self.ids(delta), self.ids(output)
        kept = self.sequences[base][:keep] if base else np.empty(0, np.int32)
        sequence = np.concatenate((kept, new, out))
        logprobs = -self._rng.random(output, dtype=np.float32)
        self.records.append(CallRecorded(
            "x", "g", name, len(self.records), base, keep, keep + delta, new, out, logprobs, logprobs,
            (VersionSpan(0, output, 7),) if output else (), "stop", token_digest(sequence), role_class=role,
            lineage=role))
        self.sequences[name] = sequence
        return name


def generate(num_calls: int, longest: int, seed: int = 0) -> Session:
    """A main context that grows to about `longest` tokens over `num_calls` calls, with side branches."""
    session, rng = Session(seed), random.Random(seed)
    num_side = num_calls // 6
    growth = longest // (num_calls - num_side - 1)
    main = session.call(None, 0, growth, 200, "main")
    while len(session.records) < num_calls:
        length = len(session.sequences[main])
        side = rng.random() * (num_calls - len(session.records)) < num_side
        if side:
            num_side -= 1
            kind = rng.choice(("summary", "sub-agent", "retry", "thinking"))
            if kind == "sub-agent":
                session.call(None, 0, 3000, 400, "sub-agent")
            else:
                role: RoleClass = "main-summary" if kind == "summary" else "main"
                session.call(main, length - (150 if kind == "thinking" else 0), 60, 300, role)
        else:
            main = session.call(main, length, growth - 200, 200, "main")
    return session


def cpu_s(action: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    started = time.process_time()
    result = action()
    return time.process_time() - started, result


def resolve(session: Session) -> CallLog:
    log = CallLog()
    for record in session.records:
        log.add(record)
    assert log.refusal is None, log.refusal
    return log


def admitted(tree: Tree) -> Member:
    targets = find_targets(tree, "policy")
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    admission = admit(tree, targets, roles, ROLE_ORDERS["paper"], 5, ("run", "x"))
    return Member("x", 1.0, tree, targets, admission)


def packed(member: Member) -> list[bytes]:
    packs = pack([member], Budget(10**7, 10**14))
    return [micro_step("g", n, p, [member]).to_bytes() for n, p in enumerate(packs)]


def tree_bytes(log: CallLog) -> int:
    """Bytes the frozen tree takes beside the records: measured, not computed."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = build_tree(log.ordered())
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert tree.num_tokens
    return after - before


def record_bytes(session: Session) -> int:
    return sum(array.nbytes for record in session.records for array in (
        record.prompt_delta, record.output_ids, record.logprobs, record.behaviour_logprobs))


def dict_trie(sequences: Iterator[np.ndarray]) -> int:
    """The naive way: one dict per token. Returns the number of nodes."""
    root: dict[int, Any] = {}
    num = 0
    for sequence in sequences:
        node = root
        for token in sequence.tolist():
            child = node.get(token)
            if child is None:
                child = node[token] = {}
                num += 1
            node = child
    return num


def neighbour_prefixes(sequences: list[np.ndarray]) -> int:
    """Full prompts, each compared with the one before: tokens not shared with it."""
    total = len(sequences[0])
    for one, other in zip(sequences, sequences[1:], strict=False):
        num = min(len(one), len(other))
        differs = one[:num] != other[:num]
        same = int(differs.argmax()) if differs.any() else num
        total += len(other) - same
    return total


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--calls", type=int, default=312)
    arguments.add_argument("--longest", type=int, default=698_500)
    arguments.add_argument("--no-dict", action="store_true", help="leave out the dict trie (it takes gigabytes)")
    options = arguments.parse_args()
    session = generate(options.calls, options.longest)
    flat = sum(len(s) for s in session.sequences.values())
    resolve_s, log = cpu_s(lambda: resolve(session))
    build_s, tree = cpu_s(lambda: build_tree(log.ordered()))
    admit_s, member = cpu_s(lambda: admitted(tree))
    pack_s, steps = cpu_s(lambda: packed(member))
    beside, held = tree_bytes(log), record_bytes(session)
    unique = tree.num_tokens
    print(f"execution: {len(session.records)} calls, longest prompt {max(r.prompt_len for r in session.records):,}, "
          f"{flat:,} flat, {unique:,} unique ({flat / unique:.0f}x), {tree.num_segments} segments")
    print(f"resolve and verify: {resolve_s:.3f} s   build: {build_s:.3f} s   targets and admission: {admit_s:.3f} s "
          f"({len(member.targets):,} targets, {member.admission.num_owned:,} owned)   pack: {pack_s:.3f} s "
          f"({sum(map(len, steps)):,} bytes)")
    print(f"memory: records {held / unique:.1f}, tree beside them {beside / unique:.1f} bytes per token")
    lcp_s, num = cpu_s(lambda: neighbour_prefixes(list(session.sequences.values())))
    print(f"full prompts against their neighbour: {lcp_s:.3f} s ({num:,} tokens, {num / unique:.2f}x the unique)")
    if not options.no_dict:
        dict_s, num = cpu_s(lambda: dict_trie(iter(session.sequences.values())))
        print(f"dict per token: {dict_s:.2f} s ({num:,} nodes, {dict_s / (resolve_s + build_s):.0f}x the time)")
    print(f"tree build_s={resolve_s + build_s:.4f} admit_s={admit_s:.4f} bytes_per_unique={beside / unique:.2f} "
          f"unique={unique} flat={flat}")


if __name__ == "__main__":
    main()
