"""How much of what coding agents send is sent again: the trees of real sessions, from hashes of 64-token blocks.

    python bench/prefix_sessions.py [FILE...]

FILE (default: $DATA, else the sessions in tests/data) is JSON lines, packed or not, as `kv-cache-tester` publishes them.
Blocks written out, unique blocks, their ratio, sub-agents and CPU seconds of one thread per session; the last line is for
scripts. Outputs have no hashes and are not in it.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gyre.trajectory.portable.formats import Counts, Imported, imported
from gyre.trajectory.portable.session import Options, Trace

EXCERPT = Path(__file__).resolve().parents[1] / "tests/data/prefix_hashes/subagent_traces_with_hashes.jsonl.xz"


def timed(sessions: Iterator[Imported]) -> Iterator[tuple[Imported, float]]:
    """Each session with the CPU seconds it took: reading, deltas, tree."""
    started = time.process_time()
    for session in sessions:
        yield session, time.process_time() - started
        started = time.process_time()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("DATA", "").split() or [str(EXCERPT)]
    arguments.add_argument("files", nargs="*", type=Path, default=[Path(name) for name in default])
    files = arguments.parse_args().files
    print(f"{'session':16}{'calls':>7}{'sub-agents':>12}{'flat':>10}{'unique':>9}{'ratio':>8}{'M tokens':>10}{'CPU s':>8}")
    started = time.process_time()
    num_sessions = flat = unique = sub_agents = 0
    for one, cpu_s in timed(imported([Trace(f.name, f.read_bytes()) for f in files], Options())):
        counts = Counts.of(one.file)
        subs, tokens = one.facts.get("sub_agents", 0), counts.flat * one.facts.get("block_size", 1) / 1e6
        ratio = counts.flat / max(counts.unique, 1)
        print(f"{one.name:16}{counts.calls:7}{subs:12}{counts.flat:10}{counts.unique:9}{ratio:8.2f}{tokens:10.1f}{cpu_s:8.2f}")
        num_sessions, flat, unique, sub_agents = num_sessions + 1, flat + counts.flat, unique + counts.unique, sub_agents + subs
    print(f"prefix_sessions sessions={num_sessions} sub_agents={sub_agents} flat={flat} unique={unique} "
          f"ratio={flat / max(unique, 1):.2f} cpu_s={time.process_time() - started:.2f}")


if __name__ == "__main__":
    main()
