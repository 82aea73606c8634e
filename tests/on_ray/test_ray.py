"""``coordinator ray`` on a real Ray, each node with a network, processes and shared memory of its own."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.keys import read_run_keys
from tests.harness.runs.by_hand import assert_same_results, in_folder, undisturbed_run
from tests.harness.runs.running import BIN, merged, write_config
from tests.on_ray.ray_harness import DASHBOARD_PORT, RayCluster, RayNode, Typed, missing, ray_in

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: tox -e ray"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(1800),
]

NUM_STEPS = 12
CONFIG: dict[str, Any] = {
    "cluster": {"trainers": 2, "rollouts": 2},
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": NUM_STEPS},
    "policy": {"train_micro_batch_size": 4},
    "checkpointing": {"save_period": 2},
}
TWO_NODES: dict[str, Any] = {"cluster": {"num_nodes": 2, "gpus_per_node": 1}}
"""Each worker of the cluster says that it has a GPU; there is none, so that processes use the CPU."""
SERVICES = ("refit --", "trainer --", "rollout --")


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Return a head and two workers."""
    with ray_in(tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run without Ray."""
    return undisturbed_run(tmp_path_factory.mktemp("one_node"), CONFIG)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Work in a folder that all nodes see."""
    with in_folder(tmp_path):
        yield tmp_path


def typed(node: RayNode, *words: str) -> Typed:
    """Start ``coordinator ray`` on a node."""
    config = write_config(merged(CONFIG, TWO_NODES))
    return Typed(node, [BIN / "coordinator", "ray", config, *words], Path(f"output-{time.monotonic_ns()}.txt"))


def wait_for_step(command: Typed, step: int) -> None:
    command.wait_for(lambda text: re.search(rf"^step +{step}/", text, re.MULTILINE))


def place_of(command: Typed, node: int) -> str:
    """Return the address where a node of the run is, or was last."""
    places = re.findall(rf"^node {node} is on ([\d.]+), ", command.output(), re.MULTILINE)
    assert places, command.output()
    return str(places[-1])


def services_on(node: RayNode) -> list[str]:
    """Return the kinds of services on a node, sorted."""
    return sorted(each.cmdline()[0].split()[0] for each in node.titled(*SERVICES))


def wait_until_nothing_runs(cluster: RayCluster) -> None:
    """Wait until no node has a process of a run."""
    deadline = time.monotonic() + 180.0  # Ray's daemons wait for their head for a minute
    while left := [each for node in cluster.workers for each in (*services_on(node), *commands_on(node))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def commands_on(node: RayNode) -> list[psutil.Process]:
    """Return a node's processes of the coordinator, guardians included."""
    return [each for each in node.processes() if "tandem.coordinator.cli" in (line := " ".join(_line(each))) and line]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_run_has_the_results_of_one_node_and_its_keys_are_nowhere_else(
    cluster: RayCluster, one_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a command line, nor in an environment, nor in any file of Ray's, whose actors hand them over."""
    monkeypatch.setenv("TANDEM_TEST_SECRET", "for-the-nodes-alone")
    command = typed(cluster.head, "logger.page=auto", "--env", "TANDEM_TEST_SECRET")
    wait_for_step(command, 2)
    address = place_of(command, 0)
    url = re.search(
        r"^page: http://127\.0\.0\.1:(\d+) on (\S+), worker\d; from elsewhere: (.*)$", command.output(), re.M
    )
    assert url is not None, command.output()
    assert url[2] == address
    assert url[3] == f"ssh -L {url[1]}:127.0.0.1:{url[1]} {address}"
    first, second = (cluster.at(place_of(command, number)) for number in (0, 1))
    assert services_on(first) == ["refit", "rollout", "trainer"]
    assert services_on(second) == ["rollout", "trainer"]
    keys = read_run_keys(Path("run"))
    assert keys is not None
    secrets = [keys.coordinator.secret.encode(), keys.joining.secret.encode()]
    for process in [each for node in cluster.workers for each in node.processes()]:
        for kind in ("cmdline", "environ"):
            text = Path(f"/proc/{process.pid}/{kind}")
            assert not any(secret in text.read_bytes() for secret in secrets if text.exists())
    trainer = second.titled("trainer --")[0]
    assert trainer.environ()["TANDEM_TEST_SECRET"] == "for-the-nodes-alone"
    assert command.wait() == 0, command.output()
    assert_same_results("run", one_node)
    wait_until_nothing_runs(cluster)
    secrets.append(b"for-the-nodes-alone")
    of_ray = [path for node in (cluster.head, *cluster.workers) for path in node.sessions.rglob("*") if path.is_file()]
    assert len(of_ray) > 10
    for path in of_ray:
        text = path.read_bytes()
        assert not any(secret in text for secret in secrets), path
        assert b"step 3/" not in text, path


def test_a_node_is_lost_and_another_added(cluster: RayCluster, one_node: Path) -> None:
    """The run waits for room, and goes on there; when the coordinator's node is lost, it is resumed."""
    command = typed(cluster.head)
    wait_for_step(command, 3)
    cluster.kill(cluster.at(place_of(command, 1)))
    command.wait_for(lambda text: re.search(r"^node 1 .* is lost; Ray places it again$", text, re.MULTILINE))
    cluster.add()
    wait_for_step(command, 6)
    cluster.kill(cluster.at(place_of(command, 0)))
    command.wait_for(lambda text: re.search(r"^node 0 .* is lost; Ray places it again$", text, re.MULTILINE))
    cluster.add()
    assert command.wait() == 0, command.output()
    assert_same_results("run", one_node)
    wait_until_nothing_runs(cluster)


def test_asked_to_end_it_saves_and_goes_on_with_it(cluster: RayCluster, one_node: Path) -> None:
    command = typed(cluster.head)
    wait_for_step(command, 3)
    terminal = [each for each in cluster.head.processes() if _line(each)[1:3] == [str(BIN / "coordinator"), "ray"]]
    assert len(terminal) == 1
    terminal[0].send_signal(signal.SIGINT)
    assert command.wait() == 130, command.output()
    assert "interrupted; continue with: coordinator up" in command.output()
    wait_until_nothing_runs(cluster)
    command = typed(cluster.head, "--resume")
    assert command.wait() == 0, command.output()
    assert_same_results("run", one_node)
    wait_until_nothing_runs(cluster)


def test_a_job_is_submitted(one_node: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The command line of a job is the command."""
    with ray_in(tmp_path_factory.mktemp("jobs"), has_jobs=True) as cluster:
        submit_a_job(cluster, one_node)


def submit_a_job(cluster: RayCluster, one_node: Path) -> None:
    config = write_config(merged(CONFIG, TWO_NODES))
    address = f"http://{cluster.head.address}:{DASHBOARD_PORT}"
    submit = ["-m", "ray.scripts.scripts", "job", "submit", f"--address={address}", "--"]
    script = f"cd {config.parent} && exec {BIN / 'coordinator'} ray {config.name}"
    output = cluster.head.run(sys.executable, *submit, "bash", "-c", script)
    assert re.search(rf"^step +{NUM_STEPS}/", output, re.MULTILINE), output
    assert "succeeded" in output
    assert_same_results("run", one_node)
    wait_until_nothing_runs(cluster)


def test_the_head_is_restarted(one_node: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With tables that survive it, the run does not notice; the command is on a worker here."""
    folder = tmp_path_factory.mktemp("head")
    with ray_in(folder, storage=folder / "tables") as cluster:
        restart_the_head(cluster, one_node)


def restart_the_head(cluster: RayCluster, one_node: Path) -> None:
    command = typed(cluster.workers[0])
    command.wait_for(lambda text: "coordinator listens on" in text)
    cluster.restart_head()
    assert command.wait() == 0, command.output()
    assert "is lost" not in command.output()
    assert_same_results("run", one_node)
    wait_until_nothing_runs(cluster)


def test_without_such_tables_all_ends_with_the_head(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ray's daemons end after a minute, the command too, and with them everything."""
    with ray_in(tmp_path_factory.mktemp("first")) as cluster:
        lose_the_head(cluster)


def lose_the_head(cluster: RayCluster) -> None:
    command = typed(cluster.workers[0], "grpo.max_num_steps=100000")
    wait_for_step(command, 3)
    cluster.head.kill()
    assert command.wait() != 0, command.output()
    wait_until_nothing_runs(cluster)


@pytest.mark.parametrize("title", ["ray::NodeActor", "raylet"])
def test_nothing_outlives_an_actor(cluster: RayCluster, one_node: Path, title: str) -> None:
    """Killed alone, or with Ray's daemon of the coordinator's node: there is another life of it, and no orphan."""
    command = typed(cluster.head)
    wait_for_step(command, 3)
    node = cluster.at(place_of(command, 0))
    former = [*node.titled(*SERVICES), *commands_on(node)]
    assert len(former) > 4
    if title == "raylet":
        victims = [each for each in node.processes() if _line(each) and _line(each)[0].endswith("/raylet")]
    else:
        victims = node.titled(title)
    assert len(victims) == 1
    victims[0].kill()
    _, alive = psutil.wait_procs(former, timeout=60.0)
    assert not alive
    if title == "raylet":
        cluster.kill(node)
        cluster.add()
    assert command.wait() == 0, command.output()
    assert_same_results("run", one_node)


def test_nothing_outlives_the_command(cluster: RayCluster) -> None:
    command = typed(cluster.head)
    wait_for_step(command, 1)
    for process in cluster.head.processes():
        if _line(process)[1:3] == [str(BIN / "coordinator"), "ray"]:
            process.kill()
    command.wait()
    wait_until_nothing_runs(cluster)


def test_what_cannot_be_placed_is_said(cluster: RayCluster) -> None:
    command = typed(cluster.head, "cluster.gpus_per_node=8", "--wait", "4")
    assert command.wait() == 1
    assert "Ray has not placed 2 nodes with 1 CPU, 8 GPU each within 4 s: the cluster has 3 nodes" in command.output()
