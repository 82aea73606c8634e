"""The processes that make a run complete, and those that the coordinator launches itself."""

from __future__ import annotations

from tandem.common.messages import ServiceKind
from tandem.config import Config

KINDS: tuple[ServiceKind, ...] = ("refit", "trainer", "rollout")


def expected_processes(config: Config) -> dict[ServiceKind, int]:
    """Return how many processes of each kind make the run complete; engines and a weight plane only if it generates."""
    if not config.generates:
        return {"trainer": config.num_trainers}
    return {"refit": 1, "trainer": config.num_trainers, "rollout": config.cluster.rollouts}


def launched_processes(config: Config) -> dict[ServiceKind, int]:
    """Return how many of the expected processes the coordinator launches itself."""
    expected = expected_processes(config)
    launch = config.cluster.launch
    if launch == "all":
        return expected
    if launch == "none":
        return dict.fromkeys(expected, 0)
    num_launched: dict[ServiceKind, int] = {
        "refit": int(launch.refit),
        "trainer": launch.trainers,
        "rollout": launch.rollouts,
    }
    return {kind: num_launched[kind] for kind in expected}
