"""One run from its configuration to its outcome: the run before it, its model, and then its attempts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from tandem.common.errors import DamagedCheckpoint, ModelError, RunFolderError, TandemError
from tandem.config.model_names import fetch_models
from tandem.coordinator.loop.attempts import RunAttempts
from tandem.coordinator.loop.invocation import CommandInvocation
from tandem.coordinator.loop.opening import open_run
from tandem.coordinator.preparing.prerequisite import CheckedConfig, choose_mode
from tandem.coordinator.scheduler.events import FinishRun
from tandem.launch.preparing.beginning import has_begun
from tandem.launch.preparing.needed_models import missing_models
from tandem.launch.preparing.new_model import make_model
from tandem.observe.run_folder.ending import SAID
from tandem.observe.run_folder.journal_writer import Journal
from tandem.observe.run_folder.recorded import checkpoints_of
from tandem.refit.model_folders.checking import check_model
from tandem.refit.model_folders.reward_models import check_reward_models
from tandem.refit.model_folders.teachers import check_teachers
from tandem.samples.model_files import load_tokenizer


def run(invocation: CommandInvocation) -> FinishRun:
    """Run a configuration, and before it the run that makes its model, if that has not been done yet.

    Raises:
        TandemError: something is wrong that is known before any process starts.
    """
    ready, say = invocation.ready, invocation.say
    if ready.prerequisite is not None:
        finish = _run_prerequisite(invocation, ready.prerequisite)
        if finish is not None and finish.outcome != "finished":
            return finish
        invocation = _adopt_model(invocation, ready.prerequisite)
    make_model(ready.config, invocation.mode, say)
    for notice in ready.notices:
        say(notice)
    _fetch(invocation)
    with contextlib.ExitStack() as stack:
        opened = open_run(invocation, stack)
        return recorded(opened.journal, RunAttempts(invocation, opened).run)


def _fetch(invocation: CommandInvocation) -> None:
    """Fetch the models that are on the Hub, before any service needs them, and check them."""
    config = invocation.ready.config
    if fetch_models(config, invocation.say):
        _look_through_models(invocation)


def _look_through_models(invocation: CommandInvocation) -> None:
    """Check models that had no weights yet during the checks of the run."""
    config = invocation.ready.config
    check_reward_models(config)
    about_teachers = (
        check_teachers(config, load_tokenizer(config), may_be_made=False) if config.teacher_sections else []
    )
    for notice in [*check_model(config), *about_teachers]:
        invocation.say(f"note: {notice}")


def _run_prerequisite(invocation: CommandInvocation, prerequisite: CheckedConfig) -> FinishRun | None:
    """Bring the prerequisite run to its end, from its current progress; return None if it had already ended."""
    mode = choose_mode(prerequisite, invocation.mode == "restart", invocation.say)
    if mode is None:
        return None
    config = invocation.ready.config
    models = " and ".join(missing_models(config).values()) or config.policy.model_name
    invocation.say(f"prerequisite {prerequisite.source}: making {models}")
    try:
        return run(invocation.of_prerequisite(prerequisite, mode))
    except DamagedCheckpoint as error:
        error.config_file = error.config_file or prerequisite.source
        raise


def _adopt_model(invocation: CommandInvocation, prerequisite: CheckedConfig) -> CommandInvocation:
    """Check the model that the prerequisite has made; return the invocation for the run itself."""
    config = invocation.ready.config
    for key, name in missing_models(config).items():
        checkpoints = checkpoints_of(Path(prerequisite.config.logger.log_dir), prerequisite.config)
        last = "".join(f"; its last checkpoint is {checkpoints.folder_of(step)}" for step in checkpoints.steps()[-1:])
        raise ModelError(f"{key}: the prerequisite {prerequisite.source} has ended, but {name!r} does not exist{last}")
    _look_through_models(invocation)
    if invocation.mode == "resume" and not has_begun(config):
        return msgspec.structs.replace(invocation, mode="new")  # the prerequisite was interrupted
    return invocation


def recorded(journal: Journal, carry_out: Callable[[], FinishRun]) -> FinishRun:
    """Carry out a run; write its outcome to the journal, also if it ends with a `TandemError`."""
    try:
        finish = carry_out()
    except TandemError as error:
        _note_end(journal, FinishRun(outcome="failed"), error)
        raise
    _note_end(journal, finish, finish.error)
    return finish


def _note_end(journal: Journal, finish: FinishRun, error: TandemError | None) -> None:
    detail = f" ({type(error).__name__}): {error}" if error is not None else ""
    with contextlib.suppress(RunFolderError):  # a full disk may be the reason for the failure
        journal.record_event("coordinator", f"the run {SAID[finish.outcome]}{detail}")
