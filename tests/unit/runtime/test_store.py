"""The SQLite file of a process: what is kept beside a snapshot is in its transaction."""

from pathlib import Path

import pytest
from gyre.runtime.store import Commit, JournalRow, Store


def test_parts_are_kept_in_order_and_leave_by_the_beginning_of_their_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite", "process")
    store.save_snapshot(b"one", [("g1/b", b"1"), ("g1/a", b"2"), ("g10/a", b"3")])
    store.commit(Commit(journal=[JournalRow("message", 0.0, b"x")]))
    store.save_snapshot(b"two", [("g2/a", b"4")], dropped=["g1/"])
    store.close()
    again = Store(tmp_path / "state.sqlite", "process")
    assert again.snapshot() == b"two"
    assert list(again.kept()) == [("g10/a", b"3"), ("g2/a", b"4")]
    assert list(again.journal()) == []


def test_a_snapshot_that_fails_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite", "process")
    store.save_snapshot(b"one", [("g1/a", b"1")])
    store.commit(Commit(journal=[JournalRow("message", 0.0, b"x")]))

    def rows():
        yield "g1/b", b"2"
        raise RuntimeError("it cannot be packed")

    with pytest.raises(RuntimeError, match="packed"):
        store.save_snapshot(b"two", rows(), dropped=["g1/"])
    assert (store.snapshot(), list(store.kept())) == (b"one", [("g1/a", b"1")])
    assert [row.body for row in store.journal()] == [b"x"]
