"""Looking around in a blob store: the names that lie right in a folder."""

import os
from pathlib import Path

import pytest
from gyre.runtime.blobs import BlobStore, open_blobs


@pytest.fixture(params=["directory", "url"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return open_blobs(str(tmp_path) if request.param == "directory" else f"memory://{tmp_path.name}")


def test_names_are_those_of_the_folder_alone(blobs: BlobStore) -> None:
    for path in ("trees/a.msgpack", "trees/b.msgpack", "trees/deeper/c.msgpack", "other/d"):
        blobs.put(path, b"x")
    assert {"a.msgpack", "b.msgpack"} <= set(blobs.names("trees")) <= {"a.msgpack", "b.msgpack", "deeper"}


def test_a_blob_that_survives_a_loss_of_power_is_synced_with_its_folder(tmp_path: Path, monkeypatch) -> None:
    """What a committed fact names must not be a file that the machine had not written yet."""
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), real(handle)))
    open_blobs(str(tmp_path / "process")).put("trees/a", b"x")
    assert synced == []
    store = open_blobs(str(tmp_path / "power"), "power")
    assert store.get(store.put("trees/a", b"x")) == b"x"
    folder = tmp_path / "power" / "trees"
    assert synced == [(folder / "a").stat().st_ino, folder.stat().st_ino]


def test_a_folder_that_is_not_there_has_no_names(blobs: BlobStore) -> None:
    assert blobs.names("trees") == []
