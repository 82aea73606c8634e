"""One run from its configuration to its outcome: its model, what it begins from, the loop, the end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tandem.common.config import Config
from tandem.common.errors import DamagedCheckpoint, ModelError
from tandem.coordinator.run.assembling import assemble
from tandem.coordinator.run.checkpoints import CheckpointFolder
from tandem.coordinator.run.ending import recorded
from tandem.coordinator.run.invocation import Invocation
from tandem.coordinator.run.journal import Journal
from tandem.coordinator.run.kept_samples import limits_of
from tandem.coordinator.run.loop import Loop
from tandem.coordinator.run.model_folder import check_model
from tandem.coordinator.run.opening import Opened, open_run
from tandem.coordinator.run.prerequisite import Ready, has_begun, how_to_begin, make_model
from tandem.coordinator.run.resuming import FROM_THE_MODEL, Resuming, Start
from tandem.coordinator.run.spec import launched_processes
from tandem.coordinator.scheduler.events import Finish, Outcome


def run(invocation: Invocation) -> Finish:
    """Run a configuration, and before it the run that makes its model, if that has not been done yet.

    Raises:
        TandemError: something is wrong that is known before any process starts.

    """
    ready, say = invocation.ready, invocation.say
    if ready.prerequisite is not None:
        finish = _run_prerequisite(invocation, ready.prerequisite)
        if finish is not None and finish.outcome != "finished":
            return finish
        invocation = _with_model(invocation, ready.prerequisite)
    make_model(ready.config, invocation.mode, say)
    for notice in ready.notices:
        say(notice)
    with contextlib.ExitStack() as stack:
        opened = open_run(invocation, stack)
        return recorded(opened.journal, lambda: _carry_out(invocation, opened))


def _run_prerequisite(invocation: Invocation, prerequisite: Ready) -> Finish | None:
    """Bring the prerequisite run to its end, from wherever it stands; None if it had ended already."""
    how = how_to_begin(prerequisite, invocation.mode == "restart", invocation.say)
    if how is None:
        return None
    invocation.say(f"prerequisite {prerequisite.source}: making {invocation.ready.config.policy.model_name}")
    try:
        return run(invocation.of_prerequisite(prerequisite, how))
    except DamagedCheckpoint as error:
        error.config_file = error.config_file or prerequisite.source
        raise


def _with_model(invocation: Invocation, prerequisite: Ready) -> Invocation:
    """Check the model that the prerequisite has made; return what is asked for now that it is there."""
    config = invocation.ready.config
    if not Path(config.policy.model_name).exists():
        raise ModelError(
            f"policy.model_name: the prerequisite {prerequisite.source} has ended, but "
            f"{config.policy.model_name!r} does not exist"
        )
    for notice in check_model(config):  # it was not there before
        invocation.say(f"note: {notice}")
    if invocation.mode == "resume" and not has_begun(config):
        return msgspec.structs.replace(invocation, mode="new")  # what was interrupted was the prerequisite
    return invocation


def _carry_out(invocation: Invocation, opened: Opened) -> Finish:
    """Run from the newest checkpoint, or the one that was asked for, to the end; or see that there is nothing to do."""
    config, journal, say = invocation.ready.config, opened.journal, invocation.say
    num_steps = invocation.ready.algorithm.num_steps
    checkpoints = _checkpoints(config, journal)
    origin = _origin(config)
    resuming = Resuming(config, journal, checkpoints, say, origin)
    if config.evaluates and journal.last_step() is not None:
        say(f"nothing to do: {journal.folder} has been evaluated, or trained on")
        return Finish(outcome="finished")
    limits = limits_of(config, journal)  # before steps are forgotten that are done again
    start = resuming.start(invocation.from_step)
    if start != origin:
        say(f"resuming at step {start.first_step} from {start.resume_from}")
    if start.first_step > num_steps and not config.evaluates:
        say(f"nothing to do: {journal.folder} has all of its {num_steps} steps")
        return Finish(outcome="finished")
    with contextlib.ExitStack() as stack:
        loop = assemble(invocation, opened, checkpoints, start, limits, stack)
        return _run_loop(loop, config, resuming, start)


def _run_loop(loop: Loop, config: Config, resuming: Resuming, start: Start) -> Finish:
    """Run the loop to its end, whatever that is. Raises `DamagedCheckpoint` if `start` turns out to be one."""
    outcome: Outcome = "failed"
    try:
        loop.launch(launched_processes(config))
        finish = loop.run()
        outcome = finish.outcome
        damage = resuming.damage_in(finish, start)
    except DamagedCheckpoint as damaged:
        damage = damaged
    finally:
        loop.end(outcome)
    if damage is not None:
        raise resuming.with_way_out(damage, start.first_step - 1)
    return finish


def _checkpoints(config: Config, journal: Journal) -> CheckpointFolder:
    checkpoints = CheckpointFolder(
        Path(config.checkpointing.checkpoint_dir),
        keep_top_k=config.checkpointing.keep_top_k,
        higher_is_better=config.checkpointing.higher_is_better,
        run_id=journal.run_id,
    )
    if config.checkpointing.enabled:
        checkpoints.prepare()
    return checkpoints


def _origin(config: Config) -> Start:
    """Return where a run begins that has no checkpoint yet."""
    if config.replay is None:
        return FROM_THE_MODEL
    from tandem.coordinator.run.replay import origin_of

    return origin_of(config)
