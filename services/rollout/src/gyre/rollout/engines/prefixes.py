"""The cached prefixes of executions that wait on a tool, in an engine that is not ours: what there is, and its export."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
from gyre.rollout.engines.host import Call, Host
from gyre.rollout.engines.moving import MoveRefused, Prefix
from gyre.rollout.engines.recent import RecentPrefixes


class HostedPrefixes:
    """`max_tokens`: how much the host's cache holds; what is older was evicted from it."""

    def __init__(self, host: Host, max_tokens: int) -> None:
        self._host = host
        self._recent = RecentPrefixes(max_tokens)
        self.remember = self._recent.remember
        self.clear = self._recent.clear

    async def export(self, namespace: str, salt: str, is_steady: Callable[[], bool]) -> Prefix:
        """What the newest request of a namespace left there, prefilled once more for export: nearly all of it is a hit.

        A token that the host samples for it is nobody's, and ends the prefix that a destination is to be asked for.
        `is_steady`: whether the cache is still the one that it was. Raises MoveRefused or HostError.
        """
        ids = self._recent.find(namespace)
        if ids is None or not is_steady() or self._host.capabilities.migration != "ticket":
            raise MoveRefused(f"nothing that could be moved is cached for {namespace!r}")
        exported = await self._host.export(Call(uuid.uuid4().hex, ids.tolist(), 1, 0.0, (), 0, salt))
        if not is_steady():
            await self._host.drop(exported.ticket)
            raise MoveRefused("the weights have changed, or the engine falls asleep")
        own = [] if exported.token_id is None else [exported.token_id]
        return Prefix(np.append(ids, np.array(own, np.int32)), exported.ticket)
