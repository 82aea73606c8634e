"""``coordinator kubernetes``: write the manifests by which Kubernetes runs a configuration."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from tandem.common.errors import OK, ConfigError
from tandem.config import load_config
from tandem.coordinator.commands.arguments import Commands, add_config


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
    from tandem.launch.kubernetes import PodNeeds, make_manifests, make_ray_manifests, write_yaml

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
