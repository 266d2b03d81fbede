"""The ranks of one cell for tests: this process leads, followers are processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Ranks:
    """This process as the leader of a cell, and followers that make whatever backend a test asks for."""

    def __init__(self, num_ranks: int, home: Path) -> None:
        self._num_ranks, self._home = num_ranks, home
        self._num_starts = 0
        self._processes: list[subprocess.Popen] = []

    @contextmanager
    def lead(self, kind: str, dtype: str = "float64", stage: int = 3, **options: Any) -> Iterator[Any]:
        """A `LeadingBackend` whose followers have the same kind of backend. After a failure the ranks begin anew."""
        import follower
        from gyre.trainer.backends.ranks import LeadingBackend

        if not self._processes:
            self._start()
        told = {"kind": kind, "dtype": dtype, "stage": stage, **options}
        try:
            self._tell(told)
            leading = LeadingBackend(follower.make(**told), self.channel, ping_s=3600)
            yield leading
            leading.close()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        import follower

        here, self._num_starts = Path(__file__).parent, self._num_starts + 1
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path]), "OMP_NUM_THREADS": "1"}
        store = self._home / f"store-{self._num_starts}"
        command = [sys.executable, str(here / "follower.py")]
        for rank in range(1, self._num_ranks):
            arguments = [str(rank), str(self._num_ranks), str(store)]
            self._processes.append(subprocess.Popen([*command, *arguments], env=environment))
        self.channel = follower.join(0, self._num_ranks, store)

    def close(self) -> None:
        """Let the followers end by themselves."""
        if self._processes:
            self._tell({})
            for process in self._processes:
                assert process.wait(60) == 0
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _tell(self, message: dict[str, Any]) -> None:
        for rank in range(1, self._num_ranks):
            self.channel.send(rank, json.dumps(message).encode())
