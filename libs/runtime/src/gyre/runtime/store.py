"""One SQLite file per process: snapshot and the parts kept beside it, journal, applied sequences and outbox.

What belongs together is changed in one transaction.

Invariants kept here:
- an event is in the journal (or in the snapshot) if and only if what it published is in the outbox or was sent;
- the same message id enters the outbox once, whatever is replayed;
- a row leaves the outbox only after the server acknowledged it.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One event as it was given to the core: `kind` names its type, `now` is the time it was given at."""

    kind: str
    now: float
    body: bytes


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """One message to publish. `headers` is MessagePack; `id` orders the outbox."""

    message_id: str
    subject: str
    headers: bytes
    body: bytes
    expected_empty: bool = False
    id: int = 0


@dataclass(slots=True)
class Commit:
    """What one turn of the loop makes durable, all or nothing."""

    journal: list[JournalRow] = field(default_factory=list)
    applied: dict[str, int] = field(default_factory=dict)
    outbox: list[OutboxRow] = field(default_factory=list)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS snapshot (one INTEGER PRIMARY KEY CHECK (one = 1), state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS kept (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS journal (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, now REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS applied (stream TEXT PRIMARY KEY, sequence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY, message_id TEXT UNIQUE NOT NULL, subject TEXT NOT NULL,
    headers BLOB NOT NULL, body BLOB, expected_empty INTEGER NOT NULL, sent INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS tries (what TEXT PRIMARY KEY, num INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS unsent ON outbox (id) WHERE sent = 0;
"""


class Store:
    """The durable half of a service. Not thread-safe; one loop owns it."""

    def __init__(self, path: Path, durability: str = "power") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        # NORMAL survives the death of the process, FULL that of the machine.
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        self._db.executescript(_SCHEMA)
        self._num_journalled: int = self._db.execute("SELECT COUNT(*) FROM journal").fetchone()[0]

    def close(self) -> None:
        self._db.close()

    def note_start(self) -> bool:
        """Note that the process runs; returns whether the one before it did not stop cleanly."""
        return self.note_try("start") > 1

    def note_clean_stop(self) -> None:
        self._db.execute("DELETE FROM tries")

    def note_try(self, what: str) -> int:
        """Count a try of `what` and return how many there were since the last clean stop."""
        self._db.execute("INSERT INTO tries VALUES (?, 1) ON CONFLICT (what) DO UPDATE SET num = num + 1", (what,))
        return self._db.execute("SELECT num FROM tries WHERE what = ?", (what,)).fetchone()[0]

    def snapshot(self) -> bytes | None:
        row = self._db.execute("SELECT state FROM snapshot").fetchone()
        return row[0] if row else None

    def journal(self) -> Iterator[JournalRow]:
        """Events since the snapshot, oldest first."""
        for kind, now, body in self._db.execute("SELECT kind, now, body FROM journal ORDER BY id"):
            yield JournalRow(kind, now, body)

    def journal_length(self) -> int:
        """Events since the snapshot. Counted here, because counting rows on every turn would cost more than the turn."""
        return self._num_journalled

    def applied(self) -> dict[str, int]:
        """Highest applied sequence by stream."""
        return dict(self._db.execute("SELECT stream, sequence FROM applied"))

    def commit(self, commit: Commit) -> None:
        """Make one turn durable."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany("INSERT INTO journal (kind, now, body) VALUES (?, ?, ?)",
                           [(r.kind, r.now, r.body) for r in commit.journal])
            db.executemany("INSERT INTO applied VALUES (?, ?) "
                           "ON CONFLICT (stream) DO UPDATE SET sequence = excluded.sequence",
                           commit.applied.items())
            db.executemany("INSERT OR IGNORE INTO outbox (message_id, subject, headers, body, expected_empty) "
                           "VALUES (?, ?, ?, ?, ?)",
                           [(r.message_id, r.subject, r.headers, r.body, r.expected_empty) for r in commit.outbox])
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
        self._num_journalled += len(commit.journal)

    def save_snapshot(self, state: bytes, kept: Iterable[tuple[str, bytes]] = (), dropped: Iterable[str] = ()) -> None:
        """Replace snapshot and journal by `state`; add `kept` parts and remove those whose names begin with `dropped`."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            db.execute("INSERT INTO snapshot VALUES (1, ?) "
                       "ON CONFLICT (one) DO UPDATE SET state = excluded.state", (state,))
            db.executemany("INSERT OR REPLACE INTO kept (name, data) VALUES (?, ?)", kept)
            db.executemany("DELETE FROM kept WHERE name >= ? AND name < ?", [(p, p + "\U0010ffff") for p in dropped])
            db.execute("DELETE FROM journal")
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
        self._num_journalled = 0

    def kept(self) -> Iterator[tuple[str, bytes]]:
        """The parts that belong to the snapshot, in the order in which they were kept."""
        yield from self._db.execute("SELECT name, data FROM kept ORDER BY id")

    def unsent(self, limit: int) -> list[OutboxRow]:
        """Messages still to be published, oldest first."""
        rows = self._db.execute("SELECT message_id, subject, headers, body, expected_empty, id FROM outbox "
                                "WHERE sent = 0 ORDER BY id LIMIT ?", (limit,))
        return [OutboxRow(m, s, h, b, bool(e), i) for m, s, h, b, e, i in rows]

    def num_unsent(self) -> int:
        return self._db.execute("SELECT COUNT(*) FROM outbox WHERE sent = 0").fetchone()[0]

    def mark_sent(self, ids: Iterable[int]) -> None:
        """The server acknowledged these; their bodies go, their ids stay so that a replay cannot say them again."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("UPDATE outbox SET sent = 1, body = NULL WHERE id = ?", [(i,) for i in ids])
        self._db.execute("COMMIT")
