"""Hostile archives: what is bad is named and left out, what is monstrous is refused, nothing gets outside."""

import contextlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from gyre.contracts.errors import BrokenBody
from gyre.contracts.events import BlobRef
from gyre.reward.snapshot import Extracted, SnapshotLimits, SnapshotRefused, extract, load_archive
from gyre.runtime.blobs import DirectoryBlobs
from hypothesis import given
from hypothesis import strategies as st

Factory = pytest.TempPathFactory
LIMITS = SnapshotLimits(num_entries=100, total_bytes=10_000, path_bytes=300, depth=8)


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644,
          size: int | None = None) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, link, mode, 1.5
    info.size = len(data) if size is None else size
    return info, data


def archive(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def unpack(tmp_path: Path, *entries: tuple[tarfile.TarInfo, bytes], limits: SnapshotLimits = LIMITS) -> Extracted:
    return extract(archive(*entries), tmp_path / "w", limits)


def reasons(extracted: Extracted) -> dict[str, str]:
    return {r.path: r.reason for r in extracted.refused}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_ordinary_workspace_comes_back_whole(tmp_path: Path, format: int) -> None:
    long = "/".join(["d" * 60] * 2) + "/" + "f" * 60 + ".py"
    data = archive(entry("a.py", b"x = 1\n"), entry("pkg", kind=tarfile.DIRTYPE), entry("pkg/b.py", b"y"),
                   entry("run.sh", b"#!", mode=0o755), entry(long, b"deep"), format=format)
    extracted = extract(data, tmp_path / "w", LIMITS)
    assert (extracted.num_files, extracted.refused) == (4, ())
    assert (tmp_path / "w/a.py").read_bytes() == b"x = 1\n"
    assert (tmp_path / "w" / long).read_bytes() == b"deep"
    assert os.access(tmp_path / "w/run.sh", os.X_OK) and not os.access(tmp_path / "w/a.py", os.X_OK)


def test_long_names_of_gnu_and_pax_are_read(tmp_path: Path) -> None:
    name = "n" * 140 + "/" + "ü" * 60
    for number, format in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        extracted = extract(archive(entry(name, b"1"), format=format), tmp_path / str(number), LIMITS)
        assert extracted.refused == () and (tmp_path / str(number) / name).read_bytes() == b"1"


@pytest.mark.parametrize(("bad", "reason"), [
    (entry("/etc/passwd", b"x"), "absolute"),
    (entry("../outside", b"x"), "climbs out"),
    (entry("a/../../outside", b"x"), "climbs out"),
    (entry("fifo", kind=tarfile.FIFOTYPE), "a FIFO"),
    (entry("dev", kind=tarfile.CHRTYPE), "a character device"),
    (entry("disk", kind=tarfile.BLKTYPE), "a block device"),
    (entry("hard", kind=tarfile.LNKTYPE, link="good.py"), "a hard link"),
    (entry("out", kind=tarfile.SYMTYPE, link="/etc"), "absolute path"),
    (entry("up", kind=tarfile.SYMTYPE, link="../.."), "outside the workspace"),
    (entry("good.py", b"again"), "an earlier entry has that path"),
    (entry("good.py/x", b"below a file"), "not a directory"),
    (entry("x" * 256, b"x"), "longer than"),
    (entry("/".join("abcdefghi"), b"x"), "deeper than"),
    (entry("", b"x"), "no name"),
])
def test_one_bad_member_is_named_and_the_rest_is_kept(tmp_path: Path, bad: tuple, reason: str) -> None:
    extracted = unpack(tmp_path, entry("good.py", b"1"), bad, entry("last.py", b"2"))
    assert [reason in r.reason for r in extracted.refused] == [True], extracted.refused
    assert (tmp_path / "w/good.py").read_bytes() == b"1" and (tmp_path / "w/last.py").read_bytes() == b"2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    extracted = unpack(tmp_path, entry("d", kind=tarfile.SYMTYPE, link="../outside"), entry("d/evil", b"x"))
    assert list(outside.iterdir()) == []
    assert (tmp_path / "w/d/evil").read_bytes() == b"x" and "an earlier entry" in reasons(extracted)["d"]


def test_links_that_lead_out_through_each_other_are_removed(tmp_path: Path) -> None:
    extracted = unpack(tmp_path, entry("x/l", kind=tarfile.SYMTYPE, link="../y/.."), entry("deep/er/f", b""),
                       entry("y", kind=tarfile.SYMTYPE, link="x/m"), entry("x/m", kind=tarfile.SYMTYPE, link=".."),
                       entry("z", kind=tarfile.SYMTYPE, link="deep/er/f"))
    assert "outside" in reasons(extracted)["x/l"]
    assert (tmp_path / "w/z").is_symlink()
    root = os.path.realpath(tmp_path / "w")
    for path in (tmp_path / "w").rglob("*"):
        assert os.path.realpath(path).startswith(root)


@pytest.mark.parametrize("entries", [
    [entry(f"f{i}", b"") for i in range(101)],
    [entry("big", b"0" * 10_001)],
    [entry("a", b"0" * 6_000), entry("a", b"0" * 6_000)],
])
def test_a_monstrous_archive_is_refused_whole(tmp_path: Path, entries: list) -> None:
    with pytest.raises(SnapshotRefused, match="more than"):
        unpack(tmp_path, *entries)


def test_a_snapshot_larger_than_any_workspace_is_not_even_read(tmp_path: Path) -> None:
    with pytest.raises(SnapshotRefused, match="at most"):
        load_archive(DirectoryBlobs(tmp_path), BlobRef("missing.tar", "0" * 32, 10**9), LIMITS)


def test_a_snapshot_that_is_missing_or_changed_is_no_refusal(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    ref = blobs.put("s.tar", archive(entry("a", b"1")))
    (tmp_path / "s.tar").write_bytes(b"0" * ref.size)
    for broken in (ref, BlobRef("none.tar", ref.digest, ref.size)):
        with pytest.raises(BrokenBody):
            load_archive(blobs, broken, LIMITS)


def test_a_sparse_file_is_left_out_by_its_pax_record(tmp_path: Path) -> None:
    info, data = entry("sparse", b"x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "sparse"}
    assert "sparse" in reasons(unpack(tmp_path, (info, data)))["sparse"]


def test_setuid_and_unwritable_modes_do_not_survive(tmp_path: Path) -> None:
    unpack(tmp_path, entry("s", b"x", mode=0o6777), entry("d", kind=tarfile.DIRTYPE, mode=0),
           entry("d/f", b"x", mode=0))
    assert (tmp_path / "w/s").stat().st_mode & 0o7000 == 0 and (tmp_path / "w/d/f").read_bytes() == b"x"


def test_a_cut_off_or_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = archive(entry("a", b"0" * 2_000), entry("b", b"1"))
    for number, bad in enumerate((whole[:1_000], whole[:700], whole[:100] + b"\xff" + whole[101:], b"PK\3\4" + whole)):
        with pytest.raises(SnapshotRefused, match="not a tar"):
            extract(bad, tmp_path / str(number), LIMITS)


def test_a_negative_or_absurd_size_is_refused(tmp_path: Path) -> None:
    """The input of CVE-2025-8194: a size that makes tarfile walk backwards for ever."""
    data = bytearray(archive(entry("a", b""), format=tarfile.USTAR_FORMAT))
    for number, size in enumerate((b"\xff" + b"\xff" * 11, b"\x80" + b"\xff" * 11, b"-0000000001\0")):
        data[124:136] = size
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
        with pytest.raises(SnapshotRefused):
            extract(bytes(data), tmp_path / str(number), LIMITS)


def test_an_empty_archive_has_no_files(tmp_path: Path) -> None:
    assert unpack(tmp_path).num_files == 0


@given(st.binary(max_size=3000))
def test_no_bytes_make_the_reader_do_anything_but_refuse(tmp_path_factory: Factory, noise: bytes) -> None:
    base = tmp_path_factory.mktemp("noise")
    with contextlib.suppress(SnapshotRefused):
        extract(noise, base / "w", LIMITS)
    assert sorted(p.name for p in base.iterdir()) == ["w"]


@given(position=st.integers(0, 2047), value=st.integers(0, 255))
def test_one_flipped_byte_never_escapes(tmp_path_factory: Factory, position: int, value: int) -> None:
    base = tmp_path_factory.mktemp("flip")
    data = bytearray(archive(entry("a/b", b"1" * 600), entry("l", kind=tarfile.SYMTYPE, link="a"),
                             format=tarfile.USTAR_FORMAT))
    data[position] = value
    with contextlib.suppress(SnapshotRefused):
        extract(bytes(data), base / "w", LIMITS)
    assert sorted(p.name for p in base.iterdir()) == ["w"]
