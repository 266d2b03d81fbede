"""`make sim SEEDS=n FIRST=k`: simulate seeds, print those that fail, with their last events and how to see them again."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from sim.simulation import Outcome, simulate_seed
from sim.story import write_story

NUM_LAST = 60


def main() -> int:
    """Returns 1 if a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last-events", type=int, default=NUM_LAST)
    parser.add_argument("--keep-going", action="store_true", help="simulate the other seeds too when one has failed")
    parser.add_argument("--story", type=Path, help="write the first failing history (or the last one) to this file")
    arguments = parser.parse_args()
    began, seconds, num_events = time.process_time(), 0.0, 0
    schedules: Counter[str] = Counter()
    failed: list[Outcome] = []
    outcome = None
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        outcome = simulate_seed(seed)
        seconds, num_events = seconds + outcome.seconds, num_events + outcome.num_events
        schedules[outcome.setting.schedule] += 1
        if outcome.failure:
            failed.append(outcome)
            report(outcome, arguments.last_events)
            if not arguments.keep_going:
                break
    shown = failed[0] if failed else outcome
    if arguments.story and shown:
        arguments.story.write_text(write_story(shown))
        print(f"history of seed {shown.setting.seed} written to {arguments.story}")
    print(f"{sum(schedules.values())} seeds, {len(failed)} failed{[o.setting.seed for o in failed] if failed else ''}; "
          f"{num_events} events, {seconds / 3600:.1f} simulated hours, {time.process_time() - began:.1f} s of CPU; "
          + ", ".join(f"{name} {num}" for name, num in sorted(schedules.items())))
    return 1 if failed else 0


def report(outcome: Outcome, num_last: int) -> None:
    """What broke, the last events, and the command that shows it again."""
    for at, who, what, detail in outcome.history[len(outcome.history) - num_last:]:
        print(f"{at:9.3f} {who:12s} {what} {str(detail)[:300]}")
    print(f"seed {outcome.setting.seed} FAILED: {outcome.failure}")
    print(f"  {outcome.setting}")
    print(f"  again: make sim SEEDS=1 FIRST={outcome.setting.seed}")


if __name__ == "__main__":
    sys.exit(main())
