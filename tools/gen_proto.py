"""Generate gRPC code from proto/ into libs/contracts/src, or check with --check that it is current."""

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
TARGET = ROOT / "libs" / "contracts" / "src"


def generate(target: Path) -> None:
    """Run protoc for every file under proto/. Raises SystemExit if protoc fails."""
    files = sorted(str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{SOURCES}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
    ]
    if protoc.main(arguments + files) != 0:
        raise SystemExit("protoc failed")


def differing(fresh: Path) -> list[str]:
    """Generated files that are missing, extra or different in the checked-in tree."""
    names = {p.relative_to(fresh) for p in fresh.rglob("*_pb2*.py*")}
    present = {
        p.relative_to(TARGET) for p in (TARGET / "gyre" / "proto").rglob("*_pb2*.py*") if "__pycache__" not in p.parts
    }
    changed = {n for n in names & present if not filecmp.cmp(fresh / n, TARGET / n, shallow=False)}
    return sorted(str(n) for n in (names ^ present) | changed)


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(TARGET)
        return
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        stale = differing(Path(directory))
    if stale:
        raise SystemExit("generated code is not current, run `make gen`: " + ", ".join(stale))
    print("generated code is current")


if __name__ == "__main__":
    main()
