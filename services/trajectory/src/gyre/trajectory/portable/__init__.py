"""Traces of other tools as trees, and trees as documents that outlive the blob store.

A reader per foreign format gives `ForeignCall`s with whole prompts; `deltas.py` writes them down as a gateway would,
against the earlier call that shares most; the usual reading makes the tree. `document.py` is our own form,
`gyre-tree/1`, which loses nothing. `python -m gyre.trajectory.portable.main` is the tool.
"""
