"""Write the manifests by which Kubernetes runs a configuration: a JobSet with a pod for every node.

The first pod has the coordinator, the others one ``coordinator join`` each, which launches that node's services; so
processes of a node share its memory. Pods find each other by a headless service. When one fails the JobSet begins all
of them again, and the run goes on from its newest checkpoint, which lies on a volume that all pods see.
"""

from __future__ import annotations

import base64
import shlex
from pathlib import PurePosixPath
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from tandem.common.keys import COORDINATOR_FILE, FOLDER, MEMBERS_FILE, RunKeys, encode
from tandem.config import Config, dump_yaml, load_config
from tandem.launch.nodes import Node, nodes_of
from tandem.observe.run_folder.journal_file import JOURNAL_NAME

Manifest = dict[str, Any]

PORT = 29400
"""Where the coordinator listens within its pod."""
_CONFIG = "/etc/tandem/config/config.yaml"
_SECRET = "/etc/tandem/keys"
_KEY_FILE = f"/tmp/{MEMBERS_FILE}"
_USER = 1000
_RESTARTS = 10
_GRACE_S = 300
"""A pod that is asked to end has so long to finish its step and to save."""


class PodNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What every pod is made of, beside what its configuration says."""

    name: str
    """Of the JobSet, and the beginning of every other name."""
    image: str
    claim: str
    """A PersistentVolumeClaim that all pods can write to: where runs, models and data are."""
    folder: str = "/workspace"
    """Where the claim is mounted; relative paths of the configuration begin there."""
    cpus: str = "8"
    memory: str = "64Gi"
    shared_memory: str = "16Gi"
    """Of /dev/shm, which counts as memory."""


def manifests(config: Config, needs: PodNeeds, keys: RunKeys) -> list[Manifest]:
    """Return the objects in the order in which they are to be made.

    `keys` are the run's, by which its processes prove that they belong to it.

    Raises:
        ConfigError: some process would be launched by no node, or by two.

    """
    nodes = nodes_of(config)
    return [
        _secret(needs, "coordinator-keys", {COORDINATOR_FILE: encode(keys), MEMBERS_FILE: encode(keys.for_members())}),
        _secret(needs, "keys", {MEMBERS_FILE: encode(keys.for_members())}),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(needs, "config"),
            "data": _configurations(config),
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(needs),
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
            "metadata": _metadata(needs),
            "spec": {
                "network": {"enableDNSHostnames": False},  # it would make a service of its own beside the one above
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["coordinator"]},
                "failurePolicy": {"maxRestarts": _RESTARTS},
                "replicatedJobs": _replicated_jobs(config, needs, nodes),
            },
        },
    ]


def to_yaml(objects: list[Manifest]) -> str:
    """Return manifests as one file for ``kubectl apply -f``."""
    return "---\n".join(yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=120) for each in objects)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes a text of several lines as one would by hand."""


def _text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _secret(needs: PodNeeds, part: str, files: dict[str, bytes]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(needs, part),
        "type": "Opaque",
        "data": {name: base64.b64encode(text).decode() for name, text in files.items()},
    }


def _configurations(config: Config) -> dict[str, str]:
    """Return the configuration, and those of runs that make its model, by the names of their files."""
    files: dict[str, str] = {}
    name = PurePosixPath(_CONFIG)
    while (earlier := config.prerequisite) is not None:
        path = name.with_name(f"prerequisite_{len(files)}.yaml" if files else "prerequisite.yaml")
        files[name.name] = dump_yaml(msgspec.structs.replace(config, prerequisite=str(path)))
        config, name = load_config(earlier), path
    return {**files, name.name: dump_yaml(config)}


def _metadata(needs: PodNeeds, part: str = "") -> Manifest:
    name = f"{needs.name}-{part}" if part else needs.name
    return {"name": name, "labels": {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/instance": needs.name}}


def _replicated_jobs(config: Config, needs: PodNeeds, nodes: tuple[Node, ...]) -> list[Manifest]:
    more = {"ports": [{"name": "coordinator", "containerPort": PORT}], **_probes()}
    jobs = [_job("coordinator", 1, _pod(config, needs, "coordinator-keys", _run_it(config), more))]
    if len(nodes) > 1:
        jobs.append(_job("nodes", len(nodes) - 1, _pod(config, needs, "keys", _join_it(needs), {})))
    return jobs


# Files of a secret can be read by a group, and keys are taken from no file that others can read: pods copy them.


def _run_it(config: Config) -> str:
    """Return the words of bash that begin the run, or go on with it."""
    run = config.logger.log_dir
    keys, journal = shlex.quote(f"{run}/{FOLDER}"), shlex.quote(f"{run}/{JOURNAL_NAME}")
    return (
        f"install -d -m 700 {keys} && install -m 600 {_SECRET}/*.json {keys}/ && "
        f"how= && if [ -e {journal} ]; then how=--resume; fi && "
        f'exec coordinator up {_CONFIG} "cluster.address=tcp://$POD_IP:{PORT}" --unfinished-code 75 $how'
    )


def _join_it(needs: PodNeeds) -> str:
    """Return the words of bash that launch a node's share of the run."""
    address = f"tcp://{needs.name}-coordinator-0-0.{needs.name}:{PORT}"
    return (
        f"install -m 600 {_SECRET}/{MEMBERS_FILE} {_KEY_FILE} && "
        f"exec coordinator join {_CONFIG} --node $((JOB_COMPLETION_INDEX + 1)) --coordinator {address} "
        f"--key-file {_KEY_FILE}"
    )


def _job(name: str, num_pods: int, pod: Manifest) -> Manifest:
    spec = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimit": 0,  # the JobSet begins all pods again, not the job one of them
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _probes() -> Manifest:
    """Return how it is told that the coordinator lives: it takes connections.

    Its first run of a configuration may make a model before it listens, and so may take long to begin.
    """
    return {
        "startupProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 10, "failureThreshold": 720},
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 10},
        "livenessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 20, "failureThreshold": 6},
    }


def _pod(config: Config, needs: PodNeeds, keys: str, command: str, more: Manifest) -> Manifest:
    gpus = {"nvidia.com/gpu": str(config.cluster.gpus_per_node)} if config.cluster.gpus_per_node else {}
    container = {
        "name": "tandem",
        "image": needs.image,
        "workingDir": needs.folder,
        "command": ["bash", "-c", command],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PYTHONPATH", "value": needs.folder},  # classes that the configuration names by dotted path
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
