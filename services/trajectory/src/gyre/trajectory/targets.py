"""Targets: the token positions that the trained policy really sampled in exactly that context.

The unit is the position in the tree, not the call: an output sampled twice from the same prompt is one run of targets
drawn twice, and a token that one call read and another sampled in the same context is a target. What other models
sampled, and what nobody was ever shown (aborted calls), is context.
"""

from dataclasses import dataclass

import numpy as np
from gyre.trajectory.tree import Tree

UNSEEN = ("abort", "error")  # finish reasons of outputs the agent never saw


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The Y targets of a tree, ascending in depth-first order.

    index     int32 [Y] token index in the tree
    call      int32 [Y] number of the first call that sampled it; logprob and version are that call's
    logprob   float32 [Y] behaviour log-prob
    version   int32 [Y] weights version it was sampled under
    offsets   [S + 1] targets of segment s are [offsets[s], offsets[s + 1])
    num_drawn   sampled policy tokens, each as often as it was drawn
    num_unseen  positions that only aborted policy calls sampled; not targets
    num_rootless  sampled first tokens of a root: no context could score them; not targets
    """

    index: np.ndarray
    call: np.ndarray
    logprob: np.ndarray
    version: np.ndarray
    offsets: tuple[int, ...]
    num_drawn: int
    num_unseen: int
    num_rootless: int

    def __len__(self) -> int:
        return len(self.index)

    def count(self, segment: int) -> int:
        return self.offsets[segment + 1] - self.offsets[segment]


def find_targets(tree: Tree, policy: str) -> Targets:
    """The targets of `tree` for calls of model `policy`."""
    first = np.full(tree.num_tokens, -1, np.int32)
    unseen = np.zeros(tree.num_tokens, bool)
    logprob = np.zeros(tree.num_tokens, np.float32)
    version = np.zeros(tree.num_tokens, np.int32)
    num_drawn = 0
    for number in range(len(tree.calls) - 1, -1, -1):  # backwards: the first call has the last word
        record = tree.calls[number].record
        if record.model != policy or len(record.output_ids) == 0:
            continue
        num_drawn += len(record.output_ids)
        done = record.prompt_len
        for start, stop in tree.spans(number, record.prompt_len, tree.calls[number].length):
            if record.finish_reason in UNSEEN:
                unseen[start:stop] = True
                continue
            first[start:stop] = number
            from_, done = done - record.prompt_len, done + stop - start
            logprob[start:stop] = record.behaviour_logprobs[from_:from_ + stop - start]
            for span in record.spans:
                low, high = max(span.start, from_), min(span.end, from_ + stop - start)
                version[start + low - from_:start + max(low, high) - from_] = span.version
    sampled = first >= 0
    roots = [start for start, parent in zip(tree.bounds, tree.parent, strict=False) if parent < 0]
    num_rootless = int(sampled[roots].sum())
    sampled[roots] = False
    index = np.flatnonzero(sampled).astype(np.int32)
    offsets = tuple(np.searchsorted(index, tree.bounds).tolist())
    return Targets(index, first[index], logprob[index], version[index], offsets, num_drawn,
                   int((unseen & (first < 0)).sum()), num_rootless)
