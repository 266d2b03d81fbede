"""What a harness leaves behind is kept whole where it may be, left out and named where it may not."""

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from gyre.contracts.errors import HarnessError
from gyre.rollout.workspace import WorkspaceLimits, materialise, pack, remove

WIDE = WorkspaceLimits()


def task_with(root: Path, **files: str) -> Path:
    task = root / "task"
    for name, text in {"instruction.md": "do it", **files}.items():
        path = task / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return task


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: m for m in tar}


def test_only_the_workspace_of_a_task_is_copied(tmp_path: Path) -> None:
    task = task_with(tmp_path, workspace__a="1", workspace__d__run="x", tests__hidden="s", solution__solve="s")
    (task / "workspace" / "d" / "run").chmod(0o755)
    (task / "workspace" / "link").symlink_to("d/run")
    target = tmp_path / "ws"
    materialise(task, target, WIDE)
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*")) == ["a", "d", "d/run", "link"]
    assert os.access(target / "d" / "run", os.X_OK)
    assert (target / "link").readlink() == Path("d/run")
    (target / "left-over").touch()
    materialise(task, target, WIDE)
    assert not (target / "left-over").exists(), "a second start begins from the task, not from the first one's remains"


def test_a_task_without_a_workspace_starts_from_nothing(tmp_path: Path) -> None:
    materialise(task_with(tmp_path), tmp_path / "ws", WIDE)
    assert list((tmp_path / "ws").iterdir()) == []


@pytest.mark.parametrize("link", ["../tests/hidden", "/etc/passwd"])
def test_a_task_whose_links_lead_out_is_refused(tmp_path: Path, link: str) -> None:
    task = task_with(tmp_path, workspace__a="1", tests__hidden="s")
    (task / "workspace" / "l").symlink_to(link)
    with pytest.raises(HarnessError, match="links that stay inside"):
        materialise(task, tmp_path / "ws", WIDE)


def test_a_task_that_is_too_large_or_not_there_is_refused(tmp_path: Path) -> None:
    task = task_with(tmp_path, workspace__a="12345", workspace__b="12345")
    for limits in (WorkspaceLimits(max_bytes=9), WorkspaceLimits(max_entries=1)):
        with pytest.raises(HarnessError, match="passes"):
            materialise(task, tmp_path / "ws", limits)
    with pytest.raises(HarnessError, match="instruction.md"):
        materialise(tmp_path / "absent", tmp_path / "ws", WIDE)


def test_packing_keeps_files_directories_modes_and_links_as_links(tmp_path: Path) -> None:
    (tmp_path / "d" / "empty").mkdir(parents=True)
    (tmp_path / "d" / "run").write_text("x")
    (tmp_path / "d" / "run").chmod(0o4777)
    (tmp_path / "out").symlink_to("/etc/passwd")
    os.link(tmp_path / "d" / "run", tmp_path / "twin")
    preserved = pack(tmp_path, WIDE)
    found = members(preserved.data)
    assert sorted(found) == ["d", "d/empty", "d/run", "out", "twin"]
    assert found["out"].issym() and found["out"].linkname == "/etc/passwd"
    assert stat.S_IMODE(found["d/run"].mode) == 0o755, "no set-uid bit and no write for others travels"
    assert found["twin"].isreg(), "a hard link is a file of its own"
    assert preserved.refused == ()


def test_packing_is_the_same_bytes_for_the_same_content(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("b", "a") if name == "one" else ("a", "b"):
            (tmp_path / name / file).write_text(file)
    os.utime(tmp_path / "two" / "a", (1, 1))
    assert pack(tmp_path / "one", WIDE).data == pack(tmp_path / "two", WIDE).data


def test_odd_files_are_left_out_and_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "new\nline").write_text("x")
    deep = tmp_path
    for _ in range(6):
        deep = deep / ("d" * 200)
        deep.mkdir()
    preserved = pack(tmp_path, WIDE)
    assert "good" in members(preserved.data)
    assert len(preserved.refused) == 3
    assert "pipe (not a file, directory or link)" in preserved.reason
    assert "new\\nline (odd name)" in preserved.reason


def test_sizes_and_counts_are_capped_and_a_sparse_bomb_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 600)
    with (tmp_path / "bomb").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "z").write_bytes(b"x" * 300)
    preserved = pack(tmp_path, WorkspaceLimits(max_bytes=1000))
    assert sorted(members(preserved.data)) == ["a", "z"]
    assert preserved.reason == "workspace: 1 entries left out: bomb (too many bytes)"
    assert len(pack(tmp_path, WorkspaceLimits(max_entries=2)).refused) == 1


def test_many_refusals_are_counted_and_few_are_named(tmp_path: Path) -> None:
    for i in range(20):
        os.mkfifo(tmp_path / f"p{i:02d}")
    reason = pack(tmp_path, WIDE).reason
    assert reason.startswith("workspace: 20 entries left out: p00")
    assert reason.endswith("and 12 more")


def test_a_directory_without_rights_is_removed_too(tmp_path: Path) -> None:
    inner = tmp_path / "home" / "locked"
    inner.mkdir(parents=True)
    (inner / "f").touch()
    inner.chmod(0o000)
    remove(tmp_path / "home")
    assert not (tmp_path / "home").exists()
