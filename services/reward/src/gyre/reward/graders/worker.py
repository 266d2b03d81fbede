"""The grading worker: one warm process that forks a child for every workspace. Standard library only.

It is started inside the sandbox and never runs a workspace's code itself: a child does, in a session of its own. One
JSON line in asks for one workspace, one JSON line out answers. The child announces each test before it runs it and says
how it ended; whatever it leaves unsaid has failed. When a test hangs or takes the process with it, the child is killed,
that one test has failed, and a new child goes on behind it. What the child says out of order is forgery, and fails all.
"""

# Every page that this process touches is copied for each child, so it stays small and does without pathlib.
# ruff: noqa: PTH108, PTH112, PTH113, PTH114, PTH118, PTH119, PTH123, PTH208
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FrameType, ModuleType

TICK_S = 0.05  # how often the processes of a slow test are counted
TICKS = 8  # how often per limit a test's own time is checked
GRACE_S = 0.5  # after the alarm inside the child has rung, before the child is killed
MAX_SWEEPS = 5000
MAX_LINE = 4096
MAX_CHILD_BYTES = 4 * 1024 * 1024
DETAIL_CHARS = 200
REPORT_FD = 3  # where the child finds its end of the pipe
STDLIB = sys.stdlib_module_names
Results = dict[str, tuple[bool, str]]


class Forged(Exception):
    """The child said something it could not have said honestly."""


class TimeIsUp(BaseException):
    """Raised inside a test whose time is up; not an Exception, so that ordinary handlers let it pass."""


class Job:
    """One workspace to grade. `ids` are `file::name`, grouped by file, in the order in which they run."""

    def __init__(self, request: dict) -> None:
        self.workspace, self.tests, self.kind = request["workspace"], request["tests"], request["kind"]
        self.ids: list[str] = request["ids"]
        self.cpu_s: float = request["test_cpu_s"]
        self.wall_s: float = request["test_wall_s"]
        self.preload: list[str] = request["preload"]
        self.deadline = time.monotonic() + request["timeout_s"]
        self.secret = ""  # begins every report of one child: what is written blindly is no report


class Worker:
    """Holds compiled tests (they are trusted, their code is never run here) and the sweep that fits the sandbox."""

    def __init__(self, *, owns_processes: bool, max_processes: int, max_memory_bytes: int) -> None:
        self._owns_processes = owns_processes
        self._crowd = Crowd(max_processes, max_memory_bytes) if owns_processes else None
        self._code: dict[str, CodeType] = {}
        self._own_temporaries = _temporaries() if owns_processes else set()

    def serve(self) -> None:
        """Answer requests until the input ends."""
        for line in sys.stdin:
            print(json.dumps(self.answer(json.loads(line))), flush=True)

    def answer(self, request: dict) -> dict:
        job = Job(request)
        try:
            self._prepare(job)
        except (OSError, SyntaxError, ImportError) as error:
            return {"id": request["id"], "error": f"the task's tests cannot be loaded: {error}"}
        try:
            results, forged = self._grade(job), ""
        except Forged as error:
            results, forged = {}, str(error)
        self._clear_temporaries()
        return {"id": request["id"], "results": results, "forged": forged}

    def _prepare(self, job: Job) -> None:
        for name in job.preload:
            importlib.import_module(name)
        for file in dict.fromkeys(i.partition("::")[0] for i in job.ids):
            path = os.path.join(job.tests, file)
            if path not in self._code:
                with open(path, "rb") as source:
                    self._code[path] = compile(source.read(), path, "exec", dont_inherit=True)
        PathFinder.find_spec("gyre_no_such_module")  # fills the caches that children inherit
        gc.freeze()

    def _grade(self, job: Job) -> Results:
        results: Results = {}
        position = 0
        while position < len(job.ids) and time.monotonic() < job.deadline:
            position = self._one_child(job, position, results)
        return results

    def _one_child(self, job: Job, first: int, results: Results) -> int:
        """Run one child from id `first` on; returns the id to go on from, which is larger than `first`."""
        read_fd, write_fd = os.pipe()
        job.secret = os.urandom(8).hex()
        pid = os.fork()
        if pid == 0:
            _child(job, self._code, first, write_fd)
        os.close(write_fd)
        try:
            return _listen(job, first, read_fd, results, self._crowd)
        finally:
            os.close(read_fd)
            self._sweep(pid)

    def _clear_temporaries(self) -> None:
        left = _temporaries() - self._own_temporaries if self._owns_processes else set()
        if left:
            import shutil  # seldom needed, and much to copy
        for path in left:
            is_tree = os.path.isdir(path) and not os.path.islink(path)
            shutil.rmtree(path, ignore_errors=True) if is_tree else os.unlink(path)

    def _sweep(self, pid: int) -> None:
        """Kill the child and all it started, and wait until it is gone."""
        for target in (-pid, pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target, signal.SIGKILL)
        os.waitpid(pid, 0)
        if self._owns_processes:
            _kill_everything()


def _kill_everything() -> None:
    """In a process namespace of its own, one call reaches everything but this process and its init."""
    for _ in range(MAX_SWEEPS):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)
    raise SystemExit("what a workspace started cannot be killed")


def _temporaries() -> set[str]:
    """What lies in the sandbox's own temporary directories, where one workspace could leave things for the next."""
    return {os.path.join(d, n) for d in ("/tmp", "/dev/shm") if os.path.isdir(d) for n in os.listdir(d)}


class Crowd:
    """All processes of the sandbox. Root may start as many as it likes, whatever its limits say, so they are counted."""

    def __init__(self, max_processes: int, max_memory_bytes: int) -> None:
        self._max_processes, self._max_memory_bytes = max_processes, max_memory_bytes

    def problem(self) -> str:
        """In words, what there is too much of; empty if all is well."""
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
        if len(processes) > self._max_processes:
            return f"started more than {self._max_processes} processes"
        resident = sum(map(_resident_bytes, processes))
        return f"used more than {self._max_memory_bytes} bytes" if resident > self._max_memory_bytes else ""


def _resident_bytes(process: str) -> int:
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended
        return 0


def _listen(job: Job, first: int, fd: int, results: Results, crowd: Crowd | None) -> int:
    """Read what the child says until it is done, silent for too long, or dead."""
    heard = Heard(job, first, results)
    patience_s = job.wall_s * (1 + 1 / TICKS) + GRACE_S
    buffer, total, quiet_at = b"", 0, time.monotonic() + patience_s
    while not heard.done:
        left = min(quiet_at, job.deadline) - time.monotonic()
        ready = select.select([fd, 0], [], [], min(max(left, 0.0), TICK_S))[0]
        if 0 in ready:  # nothing is asked while a workspace is graded: the evaluator is gone
            raise SystemExit
        if not ready:
            problem = f"ran longer than {job.wall_s:g} s" if left <= TICK_S else crowd.problem() if crowd else ""
            if problem:
                return heard.lost(problem)
            continue
        data = os.read(fd, 65536)
        if not data:
            return heard.lost("ended the process")
        total += len(data)
        *lines, buffer = (buffer + data).split(b"\n")
        if total > MAX_CHILD_BYTES or len(buffer) > MAX_LINE:
            raise Forged("the child said too much")
        for line in lines:
            heard.take(line)
            quiet_at = time.monotonic() + patience_s
    return len(job.ids)


def _parse(line: bytes, secret: str) -> list:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(report := json.loads(line), list) and len(report) == 5 and report[0] == secret:
            return report[1:]
    raise Forged("a line that is not a report")


class Heard:
    """What the child said so far, checked against what it may say next: import a file, begin an id, end that id."""

    def __init__(self, job: Job, first: int, results: Results) -> None:
        self._ids, self._secret, self._results = job.ids, job.secret, results
        self._next, self._state, self.done = first, "idle", False  # idle, importing, running

    def take(self, line: bytes) -> None:
        """Raises Forged for anything out of order."""
        verb, index, passed, detail = _parse(line, self._secret)
        if (verb, self._state) == ("done", "idle") and self._next == index == len(self._ids):
            self.done = True
        elif index != self._next or index >= len(self._ids):
            raise Forged(f"a report on test {index} when {self._next} was to come")
        elif (verb, self._state) == ("import", "idle"):
            self._state = "importing"
        elif (verb, self._state) == ("import-failed", "importing"):
            self._fail_file(str(detail))
        elif verb == "begin" and self._state in ("idle", "importing"):
            self._state = "running"
        elif (verb, self._state) == ("end", "running") and isinstance(passed, bool):
            self._end(passed, str(detail))
        else:
            raise Forged(f"{verb!r} while {self._state}")

    def lost(self, how: str) -> int:
        """The child is gone or silent: what it was at has failed. Returns the id to go on from."""
        if self._state == "importing":
            self._fail_file(f"importing {how}")
        elif self._next < len(self._ids):
            self._end(False, how)
        return self._next

    def _end(self, passed: bool, detail: str) -> None:
        self._results[self._ids[self._next]] = (passed, detail[:DETAIL_CHARS])
        self._next += 1
        self._state = "idle"

    def _fail_file(self, detail: str) -> None:
        file = self._ids[self._next].partition("::")[0]
        while self._next < len(self._ids) and self._ids[self._next].partition("::")[0] == file:
            self._end(False, detail)


# ------------------------------------------------------------------ inside the child


def _child(job: Job, code: dict[str, CodeType], first: int, write_fd: int) -> None:
    """Everything that happens in the child; never returns."""
    status = 1
    try:
        _enter(job, write_fd)
        _run(job, code, first)
        status = 0
    finally:
        os._exit(status)


def _enter(job: Job, write_fd: int) -> None:
    """Leave everything behind that belongs to the worker: its session, its pipes, its signal handlers."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if write_fd != REPORT_FD:
        os.dup2(write_fd, REPORT_FD)
    os.set_inheritable(REPORT_FD, False)
    os.closerange(REPORT_FD + 1, 1024)
    cpu = max(1, int(job.deadline - time.monotonic()) + 2)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    os.chdir(job.workspace)
    _insert_path(job)


def _insert_path(job: Job) -> None:
    """Behind the standard library and the tests, which a workspace may not replace; before installed packages."""
    places = [i for i, p in enumerate(sys.path) if os.path.basename(p) in ("site-packages", "dist-packages")]
    place = places[0] if places else len(sys.path)
    sys.path[place:place] = [job.tests, job.workspace]
    path_finder = sys.meta_path.index(PathFinder)
    sys.meta_path.insert(path_finder, WorkspaceFinder(job.workspace, taken=os.listdir(job.tests)))


class WorkspaceFinder:
    """The same as the path finder for plain modules at the top of the workspace, at a third of its cost.

    It passes on whatever is not so plain: packages, names of the standard library, names that the tests have too.
    """

    def __init__(self, workspace: str, taken: list[str]) -> None:
        self._workspace = workspace
        self._there = set(os.listdir(workspace))
        self._taken = {name.partition(".")[0] for name in taken}

    def find_spec(self, name: str, path: object = None, _target: object = None) -> ModuleSpec | None:
        there = self._there
        if path is not None or f"{name}.py" not in there or name in there or name in self._taken or name in STDLIB:
            return None
        file = f"{self._workspace}/{name}.py"
        spec = ModuleSpec(name, self, origin=file)
        spec.has_location = True
        return spec

    def create_module(self, _spec: object) -> None:
        """The default module."""

    def exec_module(self, module: ModuleType) -> None:
        with open(module.__spec__.origin, "rb") as source:
            code = compile(source.read(), module.__spec__.origin, "exec", dont_inherit=True)
        exec(code, module.__dict__)


class Reports:
    """What the child says. A report waits for the next `flush`, which has to come before foreign code runs."""

    def __init__(self, secret: str) -> None:
        self._write, self._dumps = os.write, json.dumps  # bound before foreign code can replace them
        self._secret, self._waiting = secret, b""

    def add(self, verb: str, index: int, passed: bool = False, detail: str = "") -> None:
        self._waiting += self._dumps([self._secret, verb, index, passed, detail[:DETAIL_CHARS]]).encode() + b"\n"

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, b""
        while waiting:
            waiting = waiting[self._write(REPORT_FD, waiting):]


def _run(job: Job, code: dict[str, CodeType], first: int) -> None:
    """Run ids `first` and on."""
    reports, alarm, file, namespace = Reports(job.secret), Alarm(job.cpu_s, job.wall_s), "", {}
    runner = _OwnGrader if job.kind == "grader" else _Functions
    for index in range(first, len(job.ids)):
        next_file, _, name = job.ids[index].partition("::")
        if next_file != file:
            file = next_file
            reports.add("import", index)
            reports.flush()
            path = os.path.join(job.tests, file)
            namespace, problem = runner.load(code[path], path, job, alarm)
            if problem:
                reports.add("import-failed", index, False, problem)
        if namespace is None:
            continue
        reports.add("begin", index)
        reports.flush()
        passed, detail = runner.check(namespace, name, alarm)
        reports.add("end", index, passed, detail)
    reports.add("done", len(job.ids))
    reports.flush()


class Alarm:
    """Processor and wall time for one piece of foreign code. Two timers tick all the while; setting one costs more.

    Code that swallows the first TimeIsUp gets another at each tick. Code that stops the timers is left to the worker.
    """

    def __init__(self, cpu_s: float, wall_s: float) -> None:
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._cpu_clock, self._wall_clock = time.process_time, time.monotonic
        self._cpu_end = self._wall_end = float("inf")
        signal.signal(signal.SIGPROF, self._tick)
        signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_PROF, cpu_s / TICKS, cpu_s / TICKS)
        signal.setitimer(signal.ITIMER_REAL, wall_s / TICKS, wall_s / TICKS)

    def __enter__(self) -> None:
        self._cpu_end, self._wall_end = self._cpu_clock() + self._cpu_s, self._wall_clock() + self._wall_s

    def __exit__(self, *_: object) -> None:
        self._cpu_end = self._wall_end = float("inf")

    def _tick(self, _number: int, _frame: FrameType | None) -> None:
        if self._cpu_clock() > self._cpu_end:
            raise TimeIsUp(f"used {self._cpu_s:g} s of processor time")
        if self._wall_clock() > self._wall_end:
            raise TimeIsUp(f"took {self._wall_s:g} s")


def _guarded(alarm: Alarm, function: object, *args: object) -> tuple[object, str]:
    """What `function` returned, and in words how it failed if it did. SystemExit and the like are failures too."""
    try:
        with alarm:
            return function(*args), ""
    except BaseException as error:
        if function is str:  # the text of an error of its own may be foreign code too
            return None, type(error).__name__
        text, _ = _guarded(alarm, str, error)
        return None, f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Functions:
    """Plain test functions: every `test_*` that was found from outside."""

    @staticmethod
    def load(code: CodeType, path: str, job: Job, alarm: Alarm) -> tuple[dict | None, str]:
        namespace = {"__name__": os.path.basename(path)[:-3], "__file__": path, "__builtins__": __builtins__}
        _, problem = _guarded(alarm, exec, code, namespace)
        return None if problem else namespace, problem

    @staticmethod
    def check(namespace: dict, name: str, alarm: Alarm) -> tuple[bool, str]:
        function = namespace.get(name)
        if not callable(function):
            return False, "is gone"
        _, problem = _guarded(alarm, function)
        return not problem, problem


class _OwnGrader:
    """The task's own `grade(workspace) -> {check: bool}`; called once, each check is looked up in its answer."""

    @staticmethod
    def load(code: CodeType, path: str, job: Job, alarm: Alarm) -> tuple[dict | None, str]:
        namespace, problem = _Functions.load(code, path, job, alarm)
        if namespace is None:
            return None, problem
        import pathlib

        checks, problem = _guarded(alarm, namespace["grade"], pathlib.Path(job.workspace))
        if type(checks) is dict:
            return checks, ""
        return None, problem or f"grade returned {type(checks).__name__}, not a dict of checks"

    @staticmethod
    def check(namespace: dict, name: str, alarm: Alarm) -> tuple[bool, str]:
        passed = namespace.get(name)
        return (passed is True, "" if isinstance(passed, bool) else f"grade says {passed!r}, not True or False")


def main() -> None:
    """`worker.py OWNS_PROCESSES MAX_PROCESSES MAX_MEMORY`. Only below an init of its own may it kill all it can reach."""
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owns_processes, max_processes, max_memory_bytes = map(int, sys.argv[1:])
    Worker(owns_processes=bool(owns_processes) and os.getppid() == 1, max_processes=max_processes,
           max_memory_bytes=max_memory_bytes).serve()


if __name__ == "__main__":
    main()
