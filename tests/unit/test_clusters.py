"""What each node of a cluster launches, and the manifests by which Kubernetes runs it."""

from __future__ import annotations

import base64
import subprocess
import sys
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
from tandem.launch.admission.admission import new_run_keys
from tandem.launch.kubernetes import Manifest, PodNeeds, make_manifests, write_yaml
from tandem.launch.nodes import NodeShare, nodes_of
from tandem.launch.slurm import SlurmJob, write_batch_script

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
