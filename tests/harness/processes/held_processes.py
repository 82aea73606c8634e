"""Trainer and rollout processes that stop where a test wants, and keep what passes through them: a module tests start.

Where the working directory has a file ``hold_POINT``, a process waits at that point, and says so with ``at_POINT``,
until the file is gone. ``sent.jsonl`` has a line for each sample that a rollout finished, ``trained.jsonl`` one for
each training step, and ``trained_N.npz`` what step N was trained on and the weights that its loss gave to tokens;
``step_0`` is the policy that the run began with.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PACE_S = 0.3
"""How long a training step takes, at least."""


def hold_file(point: str) -> Path:
    """Return the file that keeps processes at a point."""
    return Path(f"hold_{point}")


def at_file(point: str) -> Path:
    """Return the file that says that a process is kept at a point."""
    return Path(f"at_{point}")


def lines_of(name: str) -> list[dict[str, Any]]:
    """Return what processes have written down so far."""
    return [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]


def _hold(point: str) -> None:
    while hold_file(point).exists():
        at_file(point).touch()
        time.sleep(0.01)


def _note(name: str, **what: Any) -> None:
    with Path(f"{name}.jsonl").open("a") as file:
        file.write(f"{json.dumps(what)}\n")


def _trainer(arguments: Sequence[str]) -> int:
    from tandem.samples.batch import SampleBatch
    from tandem.trainer import cli, step
    from tandem.trainer.fetching import SampleFetcher
    from tandem.trainer.losses import policy_gradient
    from tandem.trainer.service import SavingReplies

    train, fetch, save = step.train, SampleFetcher.fetch, SavingReplies.save
    weigh = policy_gradient.importance_weights
    seen: dict[str, Any] = {}

    def fetching(self: Any, number: int, *args: Any) -> Any:
        found = fetch(self, number, *args)
        if found[0] is not None:
            seen.update(step=number, samples=SampleBatch.concatenate(self._kept), weights=[])
        return found

    def weighing(previous_BT: Any, generation_BT: Any, mask_BT: Any, settings: Any) -> Any:
        weights_BT, is_outside_BT = weigh(previous_BT, generation_BT, mask_BT, settings)
        seen["weights"].append(weights_BT[mask_BT].numpy())
        return weights_BT, is_outside_BT

    def training(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        _hold("train")
        if seen["step"] == 1:
            args[0].save(Path("step_0")).num_bytes.result()  # what no checkpoint has
        result = train(*args, **kwargs)
        time.sleep(max(0.0, PACE_S - (time.monotonic() - started)))
        _note("trained", step=seen["step"], began=started, ended=time.monotonic())
        np.savez(f"trained_{seen['step']}", weights=np.concatenate(seen["weights"]), **seen["samples"].columns)
        return result

    def saving(*args: Any) -> None:
        _hold("save")
        save(*args)

    step.train, SampleFetcher.fetch, SavingReplies.save = training, fetching, saving  # type: ignore[method-assign]
    policy_gradient.importance_weights = weighing
    return cli.main(arguments)


def _rollout(arguments: Sequence[str]) -> int:
    from tandem.common.messages import SamplesFinished
    from tandem.launch.service import ServiceContext
    from tandem.rollout import cli
    from tandem.rollout.engines.transformers import TransformersEngine
    from tandem.rollout.generating import RunningGenerations

    apply, start, reply = TransformersEngine.apply, RunningGenerations.start, ServiceContext.reply

    def applying(self: Any, version: int, *args: Any) -> Any:
        if version > 1 and self.num_unfinished:
            _hold("refit")
        return apply(self, version, *args)

    def starting(self: Any, command: Any) -> None:
        if command.purpose == "validate":
            _hold("validate")
        start(self, command)

    def replying(self: Any, command_id: int, message: Any) -> None:
        reply(self, command_id, message)
        for sample in message.samples if isinstance(message, SamplesFinished) else ():
            versions = {"oldest": sample.oldest_version, "newest": sample.newest_version}
            _note("sent", at=time.monotonic(), step=message.step, purpose=message.purpose, **versions)

    TransformersEngine.apply, RunningGenerations.start = applying, starting  # type: ignore[method-assign]
    ServiceContext.reply = replying  # type: ignore[method-assign]
    return cli.main(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the service that the first word names, with the rest."""
    kind, *rest = arguments
    return {"trainer": _trainer, "rollout": _rollout}[kind](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
