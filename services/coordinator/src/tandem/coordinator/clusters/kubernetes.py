"""``coordinator kubernetes``: write the manifests by which Kubernetes runs a configuration.

They are a JobSet with a pod per node, or a RayJob of KubeRay. The first pod runs the coordinator. Each other pod runs
``coordinator join``, which launches its node's services, so processes of a node share memory. Pods find each other
through a headless service. When a pod fails, the JobSet restarts all of them, and the run resumes from its newest
checkpoint, on a volume that all pods mount.

A RayJob has a worker of Ray per node, and a small head whose job is ``coordinator ray``; Ray moves a lost node to the
pod that replaces the lost one.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from tandem.common.errors import OK, ConfigError
from tandem.common.keys import COORDINATOR_FILE, FOLDER, PROCESSES_FILE, RunKeys, encode
from tandem.config import Config, dump_yaml, load_config
from tandem.coordinator.commands.arguments import Commands, add_config
from tandem.launch.nodes import NodeShare, nodes_of
from tandem.observe.run_folder.journal_file import JOURNAL_NAME


def add(commands: Commands) -> None:
    """Declare the command."""
    kubernetes = commands.add_parser(
        "kubernetes",
        help="write a configuration's manifests for Kubernetes",
        description="Print a JobSet with a pod for each of cluster.num_nodes nodes, and the service, the "
        "configuration and the secret that it needs, for kubectl apply -f. The cluster needs the JobSet controller, "
        "or KubeRay with --ray.",
    )
    add_config(kubernetes)
    kubernetes.add_argument(
        "--ray", action="store_true", help="a RayJob of KubeRay, with a worker for each node; the image needs Ray"
    )
    kubernetes.add_argument("--image", required=True, help="container image with Tandem in it: docker/ has two")
    kubernetes.add_argument(
        "--claim", required=True, metavar="NAME", help="a PersistentVolumeClaim that all pods can write to"
    )
    kubernetes.add_argument("--folder", default="/workspace", help="where it is mounted (default: /workspace)")
    kubernetes.add_argument("--name", help="name of the JobSet or RayJob (default: the file's)")
    kubernetes.add_argument("--cpus", default="8", metavar="N", help="CPUs of each pod (default: 8)")
    kubernetes.add_argument("--memory", default="64Gi", metavar="SIZE", help="memory of each pod (default: 64Gi)")
    kubernetes.add_argument(
        "--shared-memory", default="16Gi", metavar="SIZE", help="part of it that /dev/shm may take (default: 16Gi)"
    )
    kubernetes.add_argument("--output", type=Path, metavar="FILE", help="write them to a file (default: print them)")
    kubernetes.set_defaults(carry_out=_kubernetes)


def _kubernetes(arguments: argparse.Namespace) -> int:
    name = arguments.name or re.sub(r"[^a-z0-9]+", "-", Path(arguments.config).stem.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):  # a pod's name adds a suffix, and has 63 at most
        raise ConfigError(f"--name: {name!r} is not 1 to 40 of a-z, 0-9 and -, a letter first")
    config = load_config(arguments.config, arguments.overrides)
    from tandem.launch.admission import new_run_keys

    needs = PodNeeds(
        name=name,
        image=arguments.image,
        claim=arguments.claim,
        folder=arguments.folder,
        cpus=arguments.cpus,
        memory=arguments.memory,
        shared_memory=arguments.shared_memory,
    )
    ray = arguments.ray
    text = write_yaml(make_ray_manifests(config, needs) if ray else make_manifests(config, needs, new_run_keys()))
    if arguments.output is None:
        print(text, end="")
        return OK
    descriptor = os.open(arguments.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it has keys in it
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    print(f"{arguments.output} is written; next: kubectl apply -f {arguments.output}")
    return OK


Manifest = dict[str, Any]

PORT = 29400
"""Port of the coordinator within its pod."""
_CONFIG = "/etc/tandem/config/config.yaml"
_SECRET = "/etc/tandem/keys"
_KEY_FILE = f"/tmp/{PROCESSES_FILE}"
_RAY_CPUS = 1.0
"""CPUs that a run reserves of each worker of Ray; a run has the cluster to itself."""
_RAY_HEAD = {"cpu": "2", "memory": "8Gi"}
"""Size of Ray's head, which runs no node of the run."""
_USER = 1000
_RESTARTS = 10
_GRACE_S = 300
"""Time for a pod that is asked to end, to finish its step and save."""


class PodNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of every pod that are not in the configuration."""

    name: str
    """Name of the JobSet, and prefix of every other name."""
    image: str
    claim: str
    """A PersistentVolumeClaim that all pods can write to, for runs, models and data."""
    folder: str = "/workspace"
    """Mount point of the claim; relative paths in the configuration start here."""
    cpus: str = "8"
    memory: str = "64Gi"
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which counts towards the memory."""


def make_manifests(config: Config, needs: PodNeeds, keys: RunKeys) -> list[Manifest]:
    """Return the objects in the order of their creation.

    `keys` are the run's, with which its processes authenticate.

    Raises:
        ConfigError: some process would be launched by no node, or by two.

    """
    nodes = nodes_of(config)
    return [
        _make_secret(
            needs, "coordinator-keys", {COORDINATOR_FILE: encode(keys), PROCESSES_FILE: encode(keys.for_processes())}
        ),
        _make_secret(needs, "keys", {PROCESSES_FILE: encode(keys.for_processes())}),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _make_metadata(needs, "config"),
            "data": _make_configurations(config),
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _make_metadata(needs),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # services wait for the coordinator, not for its readiness
                "selector": {"jobset.sigs.k8s.io/jobset-name": needs.name},
                "ports": [{"name": "coordinator", "port": PORT}],
            },
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _make_metadata(needs),
            "spec": {
                "network": {"enableDNSHostnames": False},  # it would create another service beside the one above
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["coordinator"]},
                "failurePolicy": {"maxRestarts": _RESTARTS},
                "replicatedJobs": _make_replicated_jobs(config, needs, nodes),
            },
        },
    ]


def make_ray_manifests(config: Config, needs: PodNeeds) -> list[Manifest]:
    """Return a RayJob, and the configuration for it, in the order of their creation. The run makes its keys itself.

    Raises:
        ConfigError: some process would be launched by no node, or by two.

    """
    nodes = nodes_of(config)
    configuration = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _make_metadata(needs, "config"),
        "data": _make_configurations(config),
    }
    run = shlex.quote(f"{config.logger.log_dir}/{JOURNAL_NAME}")
    command = (
        f"cd {shlex.quote(needs.folder)} && how= && if [ -e {run} ]; then how=--resume; fi && "
        f"exec coordinator ray {_CONFIG} --cpus {_RAY_CPUS:g} --unfinished-code 75 $how"
    )
    worker = _make_ray_pod(config, needs, {"cpu": needs.cpus, "memory": needs.memory}, has_gpus=True)
    head = _make_ray_pod(config, needs, _RAY_HEAD, has_gpus=False)
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _make_metadata(needs),
        "spec": {
            "entrypoint": f"bash -c {shlex.quote(command)}",
            "backoffLimit": _RESTARTS,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": head}},
                "workerGroupSpecs": [
                    {
                        "groupName": "nodes",
                        "replicas": len(nodes),
                        "minReplicas": len(nodes),
                        "maxReplicas": len(nodes),
                        "rayStartParams": {},
                        "template": {"spec": worker},
                    }
                ],
            },
        },
    }
    return [configuration, job]


def _make_ray_pod(config: Config, needs: PodNeeds, requests: dict[str, str], *, has_gpus: bool) -> Manifest:
    """Return the pod of one of Ray's nodes; KubeRay adds the command that starts Ray."""
    pod = _make_pod(config, needs, "", "", {})
    del pod["subdomain"], pod["restartPolicy"], pod["automountServiceAccountToken"]  # KubeRay has its own
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "keys"]
    (container,) = pod["containers"]
    del container["command"]
    container["name"] = "ray"
    container["env"] = [variable for variable in container["env"] if variable["name"] != "POD_IP"]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "keys"]
    limits = container["resources"]["limits"] if has_gpus else {}
    container["resources"] = {"requests": requests, "limits": {**limits, "memory": requests["memory"]}}
    return pod


def write_yaml(objects: list[Manifest]) -> str:
    """Return manifests as one file for ``kubectl apply -f``."""
    return "---\n".join(yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=120) for each in objects)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """YAML dumper that writes multi-line text as blocks."""


def _describe_text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _describe_text)


def _make_secret(needs: PodNeeds, part: str, files: dict[str, bytes]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _make_metadata(needs, part),
        "type": "Opaque",
        "data": {name: base64.b64encode(text).decode() for name, text in files.items()},
    }


def _make_configurations(config: Config) -> dict[str, str]:
    """Return the configuration, and those of runs that produce its model, by file name."""
    files: dict[str, str] = {}
    name = PurePosixPath(_CONFIG)
    while (earlier := config.prerequisite) is not None:
        path = name.with_name(f"prerequisite_{len(files)}.yaml" if files else "prerequisite.yaml")
        files[name.name] = dump_yaml(msgspec.structs.replace(config, prerequisite=str(path)))
        config, name = load_config(earlier), path
    return {**files, name.name: dump_yaml(config)}


def _make_metadata(needs: PodNeeds, part: str = "") -> Manifest:
    name = f"{needs.name}-{part}" if part else needs.name
    return {"name": name, "labels": {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/instance": needs.name}}


def _make_replicated_jobs(config: Config, needs: PodNeeds, nodes: tuple[NodeShare, ...]) -> list[Manifest]:
    more = {"ports": [{"name": "coordinator", "containerPort": PORT}], **_make_probes()}
    jobs = [_make_job("coordinator", 1, _make_pod(config, needs, "coordinator-keys", _run_it(config), more))]
    if len(nodes) > 1:
        jobs.append(_make_job("nodes", len(nodes) - 1, _make_pod(config, needs, "keys", _join_it(needs), {})))
    return jobs


# Files of a secret are readable by a group, but keys are not read from files that others can read, so pods copy them.


def _run_it(config: Config) -> str:
    """Return the bash command that starts or resumes the run."""
    run = config.logger.log_dir
    keys, journal = shlex.quote(f"{run}/{FOLDER}"), shlex.quote(f"{run}/{JOURNAL_NAME}")
    return (
        f"install -d -m 700 {keys} && install -m 600 {_SECRET}/*.json {keys}/ && "
        f"how= && if [ -e {journal} ]; then how=--resume; fi && "
        f'exec coordinator up {_CONFIG} "cluster.address=tcp://$POD_IP:{PORT}" --unfinished-code 75 $how'
    )


def _join_it(needs: PodNeeds) -> str:
    """Return the bash command that launches a node's services."""
    address = f"tcp://{needs.name}-coordinator-0-0.{needs.name}:{PORT}"
    return (
        f"install -m 600 {_SECRET}/{PROCESSES_FILE} {_KEY_FILE} && "
        f"exec coordinator join {_CONFIG} --node $((JOB_COMPLETION_INDEX + 1)) --coordinator {address} "
        f"--key-file {_KEY_FILE}"
    )


def _make_job(name: str, num_pods: int, pod: Manifest) -> Manifest:
    spec = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimit": 0,  # the JobSet restarts all pods; the job must not restart single ones
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _make_probes() -> Manifest:
    """Return the probes that check whether the coordinator accepts connections.

    Its first run of a configuration may have to create a model before it listens, so it may take long to start.
    """
    return {
        "startupProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 10, "failureThreshold": 720},
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 10},
        "livenessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 20, "failureThreshold": 6},
    }


def _make_pod(config: Config, needs: PodNeeds, keys: str, command: str, more: Manifest) -> Manifest:
    gpus = {"nvidia.com/gpu": str(config.cluster.gpus_per_node)} if config.cluster.gpus_per_node else {}
    container = {
        "name": "tandem",
        "image": needs.image,
        "workingDir": needs.folder,
        "command": ["bash", "-c", command],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PYTHONPATH", "value": needs.folder},  # for classes that the configuration names by dotted path
        ],
        "resources": {
            "requests": {"cpu": needs.cpus, "memory": needs.memory},
            "limits": {"memory": needs.memory, **gpus},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "config", "mountPath": str(PurePosixPath(_CONFIG).parent), "readOnly": True},
            {"name": "keys", "mountPath": _SECRET, "readOnly": True},
            {"name": "workspace", "mountPath": needs.folder},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        **more,
    }
    return {
        "subdomain": needs.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER},
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{needs.name}-config"}},
            {"name": "keys", "secret": {"secretName": f"{needs.name}-{keys}", "defaultMode": 0o440}},
            {"name": "workspace", "persistentVolumeClaim": {"claimName": needs.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": needs.shared_memory}},
        ],
    }
