"""Work that an engine sees to its end, whoever asked for it and went away meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Chores:
    """`whole` runs one change at a time; `later` runs beside everything."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._one_at_a_time = asyncio.Lock()

    @property
    def changing(self) -> bool:
        """Whether a change is going on."""
        return self._one_at_a_time.locked()

    async def whole(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a change, which goes on if nobody waits for it any more: half a swap serves nobody."""

        async def alone() -> _T:
            async with self._one_at_a_time:
                return await work

        task = asyncio.ensure_future(alone())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Does it, and logs if it could not be done."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def cancel(self) -> None:
        """Ends what is left."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("not done: %s", task.exception())
