"""Ports for processes that are started a moment later."""

import socket
from pathlib import Path

import pytest
from gyre.runtime import ports

HOST = "127.0.0.1"


def test_ports_are_different_free_and_none_of_those_that_connections_get() -> None:
    """A port out of the range of connections was taken by one before its process listened, and the run ended over it."""
    first, last = ports.ports_of_clients()
    found = ports.free_ports(40, HOST)
    assert len(set(found)) == 40
    assert not [p for p in found if first <= p <= last or p < ports.LOWEST]
    for port in found[:5]:
        with socket.create_server((HOST, port)):
            assert port not in ports.free_ports(40, HOST)


def test_where_every_port_may_be_a_connections_the_system_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "range"
    written.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "OF_CLIENTS", written)
    assert len(set(ports.free_ports(5, HOST))) == 5
    written.write_text("nonsense")
    assert ports.ports_of_clients() == (49_152, 65_535)


def test_a_host_that_is_not_this_machine_has_none() -> None:
    with pytest.raises(OSError, match=r"."):
        ports.free_ports(1, "192.0.2.1")
