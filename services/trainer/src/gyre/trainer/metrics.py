"""Sums of micro-steps, added up over a step whoever computed them, and what they come to.

Every value is a sum over targets, except `max_*`, of which the largest counts, and counts of other things (`COUNTS`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SAMPLED_UNDER = "sampled_under_"  # + version: how many targets were sampled under it
WAYS = ("depth_first", "checkpointed")  # of micro-steps that did not fit whole, the slowest first
TIMED_WORTH = "timed_worth"  # what the timed backend has added to each element of the sums
COUNTS = ("broken_micro_steps", TIMED_WORTH, *WAYS)
CLIP_SHARE_WARNING = 0.5  # of targets


def sampling_versions(version_K: np.ndarray) -> dict[str, float]:
    """How many targets were sampled under each version of the weights, as sums."""
    versions, counts = np.unique(version_K, return_counts=True)
    return {f"{SAMPLED_UNDER}{v}": float(n) for v, n in zip(versions.tolist(), counts.tolist(), strict=True)}


def add_sums(totals: dict[str, float], sums: Mapping[str, float]) -> None:
    """Add one micro-step's sums to `totals`."""
    for name, value in sums.items():
        if name.startswith("max_"):
            totals[name] = max(totals.get(name, value), value)
        else:
            totals[name] = totals.get(name, 0.0) + value


def of_one_micro_step(sums: Mapping[str, float]) -> dict[str, float]:
    """The sums of all parts of a micro-step as its own: it counts once, under the slowest way that a part of it took."""
    taken = [way for way in WAYS if way in sums]
    return {n: v for n, v in sums.items() if n not in WAYS} | dict.fromkeys(taken[:1], 1.0)


def means(totals: Mapping[str, float], num_targets: int, version: int) -> dict[str, float]:
    """The metrics of a step trained at `version`.

    Means over targets, shares of them for what counts targets; `ess` is the effective sample size of the importance
    weights, (sum w)^2 / sum w^2, as a share of the targets; `staleness` the mean number of versions between sampling and
    training, `staleness_N` the share of targets that it is N for.
    """
    num = max(num_targets, 1)
    rest = dict(totals)
    weight, squared = rest.pop("weight", 0.0), rest.pop("weight_squared", 0.0)
    found = {"ess": weight**2 / squared / num} if squared > 0 else {}
    found |= _staleness({n: rest.pop(n) for n in list(rest) if n.startswith(SAMPLED_UNDER)}, num, version)
    undivided = {n: v for n, v in rest.items() if n.startswith("max_") or n in COUNTS}
    return {n: v / num for n, v in rest.items() if n not in undivided} | undivided | found


def _staleness(sampled: Mapping[str, float], num: int, version: int) -> dict[str, float]:
    ages = {version - int(name.removeprefix(SAMPLED_UNDER)): count for name, count in sampled.items()}
    if not ages:
        return {}
    histogram = {f"staleness_{age}": count / num for age, count in sorted(ages.items())}
    return {"staleness": sum(age * count for age, count in ages.items()) / num, "max_staleness": float(max(ages))} | histogram


def clip_warning(metrics: Mapping[str, float], kind: str, clip: tuple[float, float]) -> str:
    """What to say about a step whose clip acted on more than half of its targets; "" if it did not."""
    share = metrics.get("clipped", 0.0)
    if share <= CLIP_SHARE_WARNING:
        return ""
    return (f"the clip of loss.kind = {kind!r} acted on {100 * share:.0f} % of the targets: look at loss.clip_low = "
            f"{clip[0]:g} and loss.clip_high = {clip[1]:g}, and at burst.steps_per_burst if the data are stale")
