"""Run one box to its end: the limit that fires is named, the output is kept at both ends, nothing outlives it."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from gyre.reward.sandbox import Box, Sandbox

_HEAD = _TAIL = 2000


@dataclass(frozen=True, slots=True)
class Finished:
    """`exit_code` is None when the time limit fired; `output` is head and tail of both streams."""

    exit_code: int | None
    output: str


async def run_box(sandbox: Sandbox, box: Box, timeout_s: float, log: Path) -> Finished:
    """Run `box`; its output goes to the new file `log`, so that no background process can hold a pipe open.

    Raises:
        SandboxError: the sandbox cannot show what the box needs.
    """
    argv = sandbox.command(box)
    with log.open("xb") as output:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=box.environment,
            start_new_session=True)
    exit_code: int | None = None
    try:
        async with asyncio.timeout(timeout_s):
            exit_code = await process.wait()
    except TimeoutError:
        pass
    finally:
        await _end(process)
    return Finished(exit_code, head_and_tail(log))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the whole session, also when its leader is gone; a box dies with its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def head_and_tail(log: Path) -> str:
    """The text of a log; what is left out in the middle is said."""
    size = log.stat().st_size
    with log.open("rb") as file:
        if size <= _HEAD + _TAIL:
            return file.read().decode("utf-8", "replace")
        head = file.read(_HEAD)
        file.seek(-_TAIL, os.SEEK_END)
        tail = file.read()
    middle = f"\n[... {size - _HEAD - _TAIL} bytes left out ...]\n"
    return head.decode("utf-8", "replace") + middle + tail.decode("utf-8", "replace")
