"""What each node of a cluster launches, what Ray is asked for, and the manifests by which Kubernetes runs it."""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from msgspec.structs import replace

from tandem.common.errors import ConfigError
from tandem.common.keys import encode
from tandem.config import config_to_json, load_config
from tandem.coordinator import cli
from tandem.coordinator.clusters.kubernetes import Manifest, PodNeeds, make_manifests, make_ray_manifests, write_yaml
from tandem.coordinator.clusters.slurm import SlurmJob, write_batch_script
from tandem.launch.admission import new_run_keys
from tandem.launch.nodes import NodeShare, nodes_of
from tandem.launch.ray import RayPlan, plan_on_ray
from tandem.launch.ray_node import NodeActor, NodeOrder

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic.yaml"
KEYS = new_run_keys()
NEEDS = PodNeeds(name="sums", image="registry.example/tandem:cpu", claim="work")


def on(*settings: str) -> list[str]:
    """Return settings of the cluster, and of what of the example is to fit on it."""
    here = [setting if setting.startswith("policy.") else f"cluster.{setting}" for setting in settings]
    return [
        "policy.train_micro_batch_size=1",
        "grpo.num_prompts_per_step=60",
        "policy.train_global_batch_size=960",
        *here,
    ]


def shares(*settings: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(node.trainers, node.rollouts) for node in nodes_of(load_config(EXAMPLE, on(*settings), to_run=False))]


VLLM = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.tensor_parallel_size=2")
APART = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.num_nodes=1")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["trainers=2", "rollouts=3"], [((0, 1), (0, 1, 2))]),
        (["num_nodes=2", "gpus_per_node=2", *VLLM], [((0, 1), (0,)), ((2, 3), (1,))]),
        (["num_nodes=3", "gpus_per_node=2", *VLLM, *APART], [((0, 1), ()), ((2, 3), ()), ((), (0,))]),
        (["num_nodes=2", "gpus_per_node=4", "rollouts=2"], [((0, 1, 2, 3), (0,)), ((4, 5, 6, 7), (1,))]),
        (
            [
                "num_nodes=3",
                "gpus_per_node=0",
                "trainers=4",
                "rollouts=4",
                "launch={trainers: 1, rollouts: 1, refit: true}",
            ],
            [((0,), (0,)), ((1,), (1,)), ((2, 3), (2, 3))],
        ),
    ],
    ids=["one node", "colocated", "apart", "embedded engines", "CPUs"],
)
def test_each_process_is_launched_by_the_node_whose_gpu_it_takes(settings: list[str], expected: list[Any]) -> None:
    assert shares(*settings) == expected


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["launch=none"], "cluster.launch.refit: false"),
        (["trainers=2", "launch={trainers: 1, rollouts: 1, refit: true}"], "cluster.num_nodes is 1"),
        (
            ["num_nodes=2", "gpus_per_node=2", *VLLM, "launch={trainers: 1, rollouts: 1, refit: true}"],
            "the coordinator launches 1 trainers, but the first node has GPUs for 2",
        ),
        (
            ["num_nodes=3", "gpus_per_node=0", "trainers=1", "rollouts=1"],
            "num_nodes: 3, but node 1, 2 would launch nothing: the first launches 1 of all 1 trainers",
        ),
        (["num_nodes=2", "gpus_per_node=2", "trainers=5", *VLLM], "5 need more than the 4 GPUs of the cluster"),
    ],
)
def test_what_no_node_or_two_would_launch_and_a_node_that_launches_nothing_is_refused(
    settings: list[str], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        shares(*settings)


JOB_SET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["replicatedJobs"],
            "properties": {
                "network": {
                    "additionalProperties": False,
                    "properties": {"enableDNSHostnames": {"type": "boolean"}, "subdomain": {"type": "string"}},
                },
                "successPolicy": {
                    "additionalProperties": False,
                    "required": ["operator"],
                    "properties": {
                        "operator": {"enum": ["All", "Any"]},
                        "targetReplicatedJobs": {"type": "array", "items": {"type": "string"}},
                    },
                },
                "failurePolicy": {
                    "additionalProperties": False,
                    "properties": {"maxRestarts": {"type": "integer", "minimum": 0}},
                },
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        "additionalProperties": False,
                        "required": ["name", "template"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}
"""What the fields used here are in jobset.x-k8s.io/v1alpha2; the jobs within are checked as Kubernetes' own."""


def two_nodes() -> list[Manifest]:
    settings = on("num_nodes=2", "gpus_per_node=8", *VLLM)
    text = write_yaml(make_manifests(load_config(EXAMPLE, settings, to_run=False), NEEDS, KEYS))
    return list(yaml.safe_load_all(text))


def test_manifests_are_valid_in_the_current_release_of_kubernetes() -> None:
    *objects, job_set = two_nodes()
    assert [each["kind"] for each in objects] == ["Secret", "Secret", "ConfigMap", "Service"]
    jsonschema.validate(job_set, JOB_SET)
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, "spec": job["template"]["spec"]}
        for job in job_set["spec"]["replicatedJobs"]
    ]
    assert [job["spec"]["completions"] for job in jobs] == [1, 1]
    for each in [*objects, *jobs]:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_a_mistake_in_a_manifest_is_noticed() -> None:
    *_, job_set = two_nodes()
    spec = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_pods_find_the_configuration_the_key_and_the_coordinator() -> None:
    all_keys, members_keys, config_map, service, job_set = two_nodes()
    assert base64.b64decode(all_keys["data"]["coordinator.json"]) == encode(KEYS)
    assert {base64.b64decode(each["data"]["members.json"]) for each in (all_keys, members_keys)} == {
        encode(KEYS.for_processes())
    }
    assert set(members_keys["data"]) == {"members.json"}
    pods = [job["template"]["spec"]["template"]["spec"] for job in job_set["spec"]["replicatedJobs"]]
    run, join = (pod["containers"][0]["command"][-1] for pod in pods)
    assert "coordinator up /etc/tandem/config/config.yaml" in run
    # An indexed job's pod is called JOB-INDEX, and the JobSet's job SET-JOB-INDEX.
    assert "--coordinator tcp://sums-coordinator-0-0.sums:29400" in join
    assert {pod["subdomain"] for pod in pods} == {service["metadata"]["name"]} == {"sums"}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["port"] == 29400
    assert [pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == ["8", "8"]
    assert set(config_map["data"]) == {"config.yaml", "prerequisite.yaml"}


def test_the_configuration_in_a_pod_is_the_one_that_was_given(tmp_path: Path) -> None:
    """The prerequisite's path is the pod's; that file holds what the one here does."""
    config_map = next(each for each in two_nodes() if each["kind"] == "ConfigMap")
    texts = dict(config_map["data"])
    earlier = tmp_path / "prerequisite.yaml"
    earlier.write_text(texts["prerequisite.yaml"])
    assert "prerequisite: /etc/tandem/config/prerequisite.yaml\n" in texts["config.yaml"]
    later = tmp_path / "config.yaml"
    later.write_text(texts["config.yaml"].replace("/etc/tandem/config", str(tmp_path)))
    given = load_config(EXAMPLE, on("num_nodes=2", "gpus_per_node=8", *VLLM), to_run=False)
    assert given.prerequisite is not None
    within = load_config(later, to_run=False)
    assert config_to_json(within) == config_to_json(replace(given, prerequisite=str(earlier)))
    assert config_to_json(load_config(earlier)) == config_to_json(load_config(given.prerequisite))


def test_the_batch_script_has_no_mistake_that_shellcheck_knows(tmp_path: Path) -> None:
    settings = on("num_nodes=2", "gpus_per_node=8", *VLLM)
    config = load_config(EXAMPLE, settings, to_run=False)
    job = SlurmJob(name="sums", time="1:00:00", partition="gpu", options=("--qos=high",), setup=("module load cuda",))
    script = tmp_path / "job.sh"
    script.write_text(write_batch_script(config, EXAMPLE, settings, job))
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), script], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
    lines = script.read_text().splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert {"--nodes=2", "--gpus-per-node=8", "--time=1:00:00", "--partition=gpu", "--requeue", "--qos=high"} <= {
        *directives
    }
    assert "#   node 1: 8 trainers, 4 rollouts" in lines
    assert lines.index("module load cuda") < next(n for n, line in enumerate(lines) if "coordinator up" in line)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_containers_are_built_from_files_without_a_known_mistake(name: str) -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), ROOT / "docker" / f"{name}.Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


def test_a_node_says_what_it_launches() -> None:
    node = NodeShare(number=1, trainers=(2, 3), rollouts=(1,))
    assert node.processes == [("trainer", 2), ("trainer", 3), ("rollout", 1)]


RAY_GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": {"type": "object"},
}
RAY_JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "spec": {
            "additionalProperties": False,
            "required": ["entrypoint", "rayClusterSpec"],
            "properties": {
                "entrypoint": {"type": "string"},
                "backoffLimit": {"type": "integer", "minimum": 0},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "rayClusterSpec": {
                    "additionalProperties": False,
                    "required": ["headGroupSpec"],
                    "properties": {
                        "headGroupSpec": {
                            "additionalProperties": False,
                            "required": ["rayStartParams", "template"],
                            "properties": RAY_GROUP,
                        },
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {
                                "additionalProperties": False,
                                "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                                "properties": {
                                    "groupName": {"type": "string"},
                                    "replicas": {"type": "integer"},
                                    "minReplicas": {"type": "integer"},
                                    "maxReplicas": {"type": "integer"},
                                    **RAY_GROUP,
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
"""What the fields used here are in KubeRay's ray.io/v1; the pods within are checked as Kubernetes' own."""


def test_a_ray_job_has_a_worker_for_each_node() -> None:
    config = load_config(EXAMPLE, on("num_nodes=2", "gpus_per_node=8", *VLLM), to_run=False)
    config_map, job = yaml.safe_load_all(write_yaml(make_ray_manifests(config, NEEDS)))
    jsonschema.validate(job, RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}, "the head has no node of the run"
    groups = (workers, cluster["headGroupSpec"])
    limits = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in groups]
    assert [limit.get("nvidia.com/gpu") for limit in limits] == ["8", None]
    for group in groups:
        # Ray's operator sets the restart policy; a bare pod has one, too.
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    kubernetes_validate.validate(config_map, kubernetes_validate.latest_version(), strict=True)
    assert "coordinator ray /etc/tandem/config/config.yaml" in job["spec"]["entrypoint"]
    assert "secret" not in yaml.safe_dump(job).lower()


def planned(*settings: str, **options: Any) -> RayPlan:
    return plan_on_ray(load_config(EXAMPLE, on(*settings), to_run=False), "sums.yaml", settings, **options)


def test_ray_is_asked_for_a_bundle_a_node() -> None:
    plan = planned("num_nodes=2", "gpus_per_node=8", *VLLM, cpus=4.0, resources={"accelerator_type:H100": 0.001})
    assert plan.bundles == ({"CPU": 4.0, "GPU": 8.0, "accelerator_type:H100": 0.001},) * 2
    assert plan.needs == "2 nodes with 4 CPU, 8 GPU, 0.001 accelerator_type:H100 each"
    assert plan.nodes[0].description == "coordinator, refit, 8 trainers, 4 rollouts"
    assert plan.nodes[1].description == "8 trainers, 4 rollouts"
    assert planned("trainers=1", "rollouts=1", "gpus_per_node=0").bundles == ({"CPU": 1.0},)


@pytest.mark.parametrize(("address", "port"), [("tcp://127.0.0.1:*", 0), ("tcp://0.0.0.0:5555", 5555)])
def test_the_port_may_be_set_and_the_host_is_the_node_s(address: str, port: int) -> None:
    assert planned(f"address={address}").port == port


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--address", "ray://10.0.0.1:10001"], "--address ray://10.0.0.1:10001: not supported; run this on a node"),
        (["--resource", "H100"], "--resource H100: 'H100' is not a number above 0"),
        (["--resource", "GPU=8"], "--resource GPU=8: not NAME=AMOUNT of a custom resource: cluster.gpus_per_node"),
        (["--env", "TANDEM_NOT_SET"], "--env TANDEM_NOT_SET: there is no such environment variable here"),
        (["cluster.launch=none"], "cluster.launch.refit: false"),
    ],
)
def test_what_ray_cannot_be_asked_for_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert cli.main(["ray", str(EXAMPLE), *words]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {error}")
    assert text.count("\n") == 1


def test_the_page_has_commands_that_are_understood() -> None:
    """Those of Ray; the line of ``ray job submit`` is one of them behind that."""
    page = (ROOT / "docs" / "clusters.md").read_text().partition("## Ray")[2].partition("## Kubernetes")[0]
    block = page.split("```")[1].strip().splitlines()
    assert block[0] == "pip install 'tandem-rl[ray]'"
    assert block[2] == f"ray job submit -- bash -c 'cd /shared && {block[1]}'"
    assert cli._parse(block[1].split()[1:]).command == "ray"
    assert "ray = [" in (ROOT / "pyproject.toml").read_text()


def test_without_ray_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["ray", str(EXAMPLE)]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: coordinator ray needs Ray: pip install 'tandem-rl[ray]'")
    assert text.count("\n") == 1


def test_nothing_of_ray_is_imported_by_other_commands() -> None:
    code = "import sys, tandem.coordinator.cli; assert not {'ray', 'tandem.launch.ray'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[NodeActor]:
    actor = NodeActor()
    yield actor
    actor.stop()


def read_to_end(actor: NodeActor) -> tuple[list[str], int]:
    """Return what the actor's process prints, and how it ends."""
    lines: list[str] = []
    position, deadline = 0, time.monotonic() + 120.0
    while time.monotonic() < deadline:
        output = actor.read(position, 1.0)
        lines += output.lines
        position = output.position
        if output.code is not None:
            return lines, output.code
    raise AssertionError(f"it has not ended: {lines}")


def an_order(folder: Path) -> NodeOrder:
    return NodeOrder(folder=str(folder), config="config.yaml", run="run", environment={"TANDEM_MARK": "1"})


def test_an_actor_has_the_lines_and_the_exit_code_of_its_process(actor: NodeActor, tmp_path: Path) -> None:
    actor.start(an_order(tmp_path), ["up", "missing.yaml"], b"")
    lines, code = read_to_end(actor)
    assert code == 2
    assert lines[-1].startswith("error: ")
    assert "missing.yaml" in lines[-1]


def test_a_node_that_does_not_see_the_run_folder_has_its_keys_in_memory(actor: NodeActor, tmp_path: Path) -> None:
    """`coordinator join` reads them from there, and waits for a coordinator that is not there."""
    order = an_order(tmp_path)
    assert not actor.sees_keys(order, KEYS.coordinator.public)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"defaults": str(EXAMPLE)}))
    settings = ["cluster.num_nodes=2", "cluster.gpus_per_node=0", "cluster.rollouts=2"]
    launch = "cluster.launch={trainers: 1, rollouts: 1, refit: true}"
    words = ["join", "config.yaml", *settings, launch, "--node", "1", "--coordinator", "tcp://127.0.0.1:9"]
    actor.start(order, [*words, "--join-timeout", "1"], encode(KEYS.for_processes()))
    lines, code = read_to_end(actor)
    assert code == 1
    assert any("no answer from tcp://127.0.0.1:9 within 1 s" in line for line in lines), lines
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".json")]


def test_a_port_is_kept_for_the_coordinator(tmp_path: Path) -> None:
    """No other process gets it by asking for any, and the coordinator gets it by its number."""
    from tandem.common import wire
    from tandem.common.curve import AdmittedKeys
    from tandem.launch.ray_node import _reserve_port

    with _reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        hub = wire.Hub(f"tcp://127.0.0.1:{port}", KEYS.coordinator, AdmittedKeys([]))
        assert hub.address == f"tcp://127.0.0.1:{port}"
        hub.close()


def test_a_process_hears_ctrl_c_where_ray_does_not(actor: NodeActor, tmp_path: Path) -> None:
    """A shell starts what is in the background with Ctrl-C ignored, and Ray's daemon may be that."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        words = ["join", str(EXAMPLE), "cluster.num_nodes=2", "cluster.gpus_per_node=0", "cluster.rollouts=2"]
        launch = "cluster.launch={trainers: 1, rollouts: 1, refit: true}"
        actor.start(an_order(tmp_path), [*words, launch, "--node", "1", "--coordinator", "tcp://127.0.0.1:9"], b"")
    finally:
        signal.signal(signal.SIGINT, former)
    deadline = time.monotonic() + 60.0
    while not any("waiting for the run's key file" in line for line in actor.read(0, 1.0).lines):
        assert time.monotonic() < deadline
    actor.send_signal(signal.SIGINT)
    assert read_to_end(actor)[1] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_an_actor_has_started_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    """Even if it is killed, as Ray does to actors of a run that has ended."""
    code = (
        "import os, signal, sys, time\n"
        "from tandem.launch.ray_node import NodeActor, NodeOrder\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which shells ignore for what runs behind
        "actor = NodeActor()\n"
        f"order = NodeOrder(folder={str(tmp_path)!r}, config='c', run='run', environment={{}})\n"
        "actor.start(order, ['join', 'c', '--node', '1', '--coordinator', 'tcp://127.0.0.1:9'], b'')\n"
        "print(actor._process._guardian.pid, actor._process._read_pid(), flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        owner.send_signal(number)
        owner.wait(60)
    deadline = time.monotonic() + 60.0
    while [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
