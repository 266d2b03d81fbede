"""Who owns the devices of a cell."""

from pathlib import Path

from gyre.runtime.devices import DeviceLock, EpochRecord


def test_one_side_owns_the_devices_until_it_lets_go(tmp_path: Path) -> None:
    engine, trainer = DeviceLock(tmp_path, 0, "engine"), DeviceLock(tmp_path, 0, "trainer")
    assert engine.try_take(1) and engine.held
    assert not trainer.try_take(2)
    engine.give_back(2)
    assert trainer.try_take(2) and trainer.last() == EpochRecord(2, "trainer")


def test_an_older_epoch_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    engine, trainer = DeviceLock(tmp_path, 0, "engine"), DeviceLock(tmp_path, 0, "trainer")
    assert engine.try_take(5)
    assert not engine.try_take(4) and engine.held
    assert not trainer.try_take(9)
    engine.give_back()
    assert not trainer.try_take(4) and trainer.try_take(5)


def test_giving_back_for_a_newer_epoch_fences_the_older_ones(tmp_path: Path) -> None:
    engine, trainer = DeviceLock(tmp_path, 0, "engine"), DeviceLock(tmp_path, 0, "trainer")
    assert engine.try_take(5)
    engine.give_back(6)
    engine.give_back(6)
    assert engine.last() == EpochRecord(6, "nobody")
    assert not trainer.try_take(5) and trainer.try_take(6)


def test_cells_do_not_share_devices(tmp_path: Path) -> None:
    assert DeviceLock(tmp_path, 0, "engine").try_take(0)
    assert DeviceLock(tmp_path, 1, "engine").try_take(0)
