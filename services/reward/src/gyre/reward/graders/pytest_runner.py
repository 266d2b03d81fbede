"""Runs inside the box: pytest on /tests with /app importable, one JSON line per test case into /report/report.jsonl."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FLAGS = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=/tests", "--confcutdir=/tests", "-o", "addopts=",
         "-q", "/tests"]


class TimeIsUp(BaseException):
    """A test took too long; not an Exception, so that ordinary handlers let it pass."""


def _ring(_number: int, _frame: object) -> None:
    raise TimeIsUp("took too long")


class Reporter:
    """Writes how each case ended; `write` is bound before foreign code can replace it."""

    def __init__(self, path: Path, test_wall_s: float) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._write = os.write
        self._dumps = json.dumps
        self._timer = signal.setitimer
        self._test_wall_s = test_wall_s
        signal.signal(signal.SIGALRM, _ring)

    def say(self, *values: object) -> None:
        self._write(self._fd, self._dumps(values).encode() + b"\n")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._timer(signal.ITIMER_REAL, self._test_wall_s)
        yield
        self._timer(signal.ITIMER_REAL, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case has passed when its call did; a setup or teardown that fails fails it."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("[")[0]
            self.say("test", name, report.outcome == "passed", str(report.longrepr or "")[-200:])


def main() -> None:
    """`run_pytest.py SECONDS_PER_TEST`."""
    places = [i for i, p in enumerate(sys.path) if p.endswith(("site-packages", "dist-packages"))]
    sys.path.insert(places[0] if places else len(sys.path), "/app")
    reporter = Reporter(Path("/report/report.jsonl"), float(sys.argv[1]))
    reporter.say("start")
    code = 1
    try:
        code = int(pytest.main(FLAGS, plugins=[reporter]))
    finally:  # whatever the workspace registered to run at exit does not run
        reporter.say("end")
        os._exit(code)


if __name__ == "__main__":
    main()
