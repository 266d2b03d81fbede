"""Recorded calls of live executions on disk, so that a gateway that dies comes back with every context and answer.

A call is written here before its record enters the service's outbox. If the gateway dies between the two, `load` gives
it back and it is submitted again; its id makes that harmless.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.codec import pack, unpack
from gyre.contracts.events import CallRecorded
from gyre.rollout.gateway.messages import Answer, CallRefused


@dataclass(frozen=True, slots=True, eq=False)
class ArchivedCall:
    """One call with what the harness was told. `request_key` names the request, `transcript_key` request and answer.

    `stall_s`: how long calls waited for an engine since the call before this one was recorded; `delivered`: calls whose
    answers reached the harness since then; `answered`: tool calls whose results were seen since then; `num_opening`: as
    the renderer says.
    """

    record: CallRecorded
    answer: Answer
    request_key: bytes
    transcript_key: bytes
    stall_s: float = 0.0
    delivered: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    num_opening: int = 0


class CallArchive:
    """One SQLite file, owned by the gateway's event loop."""

    def __init__(self, path: Path | str, durability: str = "power") -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._waiting: list[tuple[str, int, bytes]] = []
        self._written: asyncio.Future[None] | None = None
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        self._db.execute("CREATE TABLE IF NOT EXISTS call (execution TEXT, number INTEGER, body BLOB NOT NULL, "
                         "PRIMARY KEY (execution, number)) WITHOUT ROWID")

    async def put(self, call: ArchivedCall) -> None:
        """Make one call durable; a later put of the same execution and index replaces it.

        Calls that finish in the same turn of the event loop share one transaction.
        """
        loop = asyncio.get_running_loop()
        if self._written is None:
            self._written = loop.create_future()
            loop.call_soon(self._write)
        self._waiting.append((call.record.execution, call.record.index, pack(call)))
        await asyncio.shield(self._written)

    def _write(self) -> None:
        rows, self._waiting = self._waiting, []
        written, self._written = self._written, None
        assert written is not None, "only `put` schedules a write"
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO call VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            written.set_exception(CallRefused(503, f"the call cannot be kept: {error}", "server_error", "disk"))
        else:
            written.set_result(None)

    def load(self, execution: str) -> Iterator[ArchivedCall]:
        """The calls of an execution in the order of their index."""
        rows = self._db.execute("SELECT body FROM call WHERE execution = ? ORDER BY number", (execution,))
        for (body,) in rows:
            yield unpack(body, ArchivedCall)

    def forget(self, execution: str) -> None:
        """Drop an execution's calls once it has terminated."""
        self._db.execute("DELETE FROM call WHERE execution = ?", (execution,))

    def executions(self) -> list[str]:
        """Executions of which calls are kept."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT execution FROM call")]

    def close(self) -> None:
        self._db.close()
