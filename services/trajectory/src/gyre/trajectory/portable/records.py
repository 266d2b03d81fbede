"""The records of an execution, made again from its tree file: the inverse of `inspection.tree_file`."""

import numpy as np
from gyre.contracts.events import CallRecorded
from gyre.trajectory.inspection import TreeFile
from gyre.trajectory.tree import Tree


def records_of(file: TreeFile) -> list[CallRecorded]:
    """Every record in gateway order, as it was recorded, but for `routed_experts`, which a tree does not keep."""
    tree = _bare(file)
    sizes = [note.length - note.prompt_len for note in file.calls]
    edges = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).tolist()
    records = []
    for number, note in enumerate(file.calls):
        low, high = edges[number], edges[number + 1]
        records.append(CallRecorded(
            file.header.outcome.execution, file.header.group, note.call, note.index, note.base_call, note.keep_len,
            note.prompt_len, _read(tree, number, note.keep_len, note.prompt_len),
            _read(tree, number, note.prompt_len, note.length), file.logprobs[low:high], file.behaviour_logprobs[low:high],
            note.spans, note.finish_reason, note.digest, note.model, note.said_role, note.lineage, note.sampling, note.cell,
            evidence=note.evidence))
    return records


def _bare(file: TreeFile) -> Tree:
    """The tree without its calls: enough to find where tokens lie."""
    bounds, parent, depth = (tuple(array.tolist()) for array in (file.bounds, file.parent, file.depth))
    return Tree((), file.ids, bounds, parent, depth, (), tuple(note.segment for note in file.calls))


def _read(tree: Tree, call: int, start: int, stop: int) -> np.ndarray:
    pieces = [tree.ids[low:high] for low, high in tree.spans(call, start, stop)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)
