"""Which prefix a namespace used last, so that the KV of an execution that waits on a tool can be found and moved."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class RecentPrefixes:
    """The newest filed ids of each namespace, at most `max_tokens` in all; the longest unused go first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._ids: OrderedDict[str, np.ndarray] = OrderedDict()

    def remember(self, namespace: str, ids: np.ndarray) -> None:
        """`ids` int32 are copied. The namespace "" is everyone's and so never moves."""
        if not namespace or len(ids) == 0:
            return
        self._forget(namespace)
        self._ids[namespace] = ids.copy()
        self._num_tokens += len(ids)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._ids)))

    def find(self, namespace: str) -> np.ndarray | None:
        """What was remembered last, int32."""
        return self._ids.get(namespace)

    def clear(self) -> None:
        """Forgets everything."""
        self._ids.clear()
        self._num_tokens = 0

    def _forget(self, namespace: str) -> None:
        found = self._ids.pop(namespace, None)
        if found is not None:
            self._num_tokens -= len(found)
