"""One run from its configuration to its outcome: the run before it, its model, and then its attempts.

All trainers restart when one of their ranks is lost. An attempt has one scheduler and one loop. It ends with the run,
or with the loss of a trainer rank. Then all trainers are started again, and the next attempt continues from the newest
checkpoint by the rules of ``--resume``. Steps after the checkpoint are invalidated
(`tandem.coordinator.preparing.resuming`), and their samples are restored and trained on again
(`tandem.coordinator.loop.restored_samples`). Engines and the refit service stay; the setup requests of each attempt
reset them.

No message of an earlier attempt passes for an answer: command ids continue from attempt to attempt, and the key of a
replaced process is rejected. A process that hangs counts as lost: it is killed if it was launched, and told to exit if
not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tandem.common import errors, messages, signals
from tandem.config import Config
from tandem.config.model_names import fetch_models
from tandem.coordinator.loop.loop import CoordinatorLoop
from tandem.coordinator.loop.opening import (
    CommandInvocation,
    OpenedResources,
    RunSnapshot,
    assemble,
    describe_processes,
    find_first_command_id,
    lasting,
    open_run,
)
from tandem.coordinator.loop.restored_samples import limits_of
from tandem.coordinator.model_folders import check_model, check_reward_models, check_teachers
from tandem.coordinator.observers.live_file import LiveFile, LiveSnapshot
from tandem.coordinator.preparing.prerequisite import CheckedConfig, choose_mode
from tandem.coordinator.preparing.resuming import FROM_THE_MODEL, ResumePoints, StartingPoint
from tandem.coordinator.scheduler.engines.processes import ProcessFailures
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.events import FinishRun, ProcessLost
from tandem.launch import child, known_processes, nodes
from tandem.launch.preparing.beginning import has_begun
from tandem.launch.preparing.needed_models import list_missing_models, make_model
from tandem.observe.exporters.telemetry import TensorBoardWriter
from tandem.observe.run_folder.checkpoints import CheckpointFolder, checkpoints_of
from tandem.observe.run_folder.journal import SAID, Outcome
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.model_files import load_tokenizer
from tandem.samples.sample_files import RestoreLimits

_GRACE_S = 10.0
_GRACE_AFTER_FAILURE_S = 1.0
"""Time for processes to end by themselves. After a failure, ranks may sit in a collective that will never complete."""
_POLL_S = 0.1
_AGAIN = "a trainer is lost, and all of them are started again"


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
        carry_out = RunAttempts(invocation, opened).run
        if opened.evaluations is not None:
            carry_out = partial(opened.evaluations.wait_after, carry_out)
        return record_outcome(opened.journal, carry_out)


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
    models = " and ".join(list_missing_models(config).values()) or config.policy.model_name
    invocation.say(f"prerequisite {prerequisite.source}: making {models}")
    try:
        return run(invocation.of_prerequisite(prerequisite, mode))
    except errors.DamagedCheckpoint as error:
        error.config_file = error.config_file or prerequisite.source
        raise


def _adopt_model(invocation: CommandInvocation, prerequisite: CheckedConfig) -> CommandInvocation:
    """Check the model that the prerequisite has made; return the invocation for the run itself."""
    config = invocation.ready.config
    for key, name in list_missing_models(config).items():
        checkpoints = checkpoints_of(Path(prerequisite.config.logger.log_dir), prerequisite.config)
        last = "".join(f"; its last checkpoint is {checkpoints.folder_of(step)}" for step in checkpoints.steps()[-1:])
        raise errors.ModelError(
            f"{key}: the prerequisite {prerequisite.source} has ended, but {name!r} does not exist{last}"
        )
    _look_through_models(invocation)
    if invocation.mode == "resume" and not has_begun(config):
        return msgspec.structs.replace(invocation, mode="new")  # the prerequisite was interrupted
    return invocation


def record_outcome(journal: Journal, carry_out: Callable[[], FinishRun]) -> FinishRun:
    """Carry out a run; write its outcome to the journal, also if it ends with a `TandemError`."""
    try:
        finish = carry_out()
    except errors.TandemError as error:
        _note_end(journal, FinishRun(outcome="failed"), error)
        raise
    _note_end(journal, finish, finish.error)
    return finish


def _note_end(journal: Journal, finish: FinishRun, error: errors.TandemError | None) -> None:
    detail = f" ({type(error).__name__}): {error}" if error is not None else ""
    with contextlib.suppress(errors.RunFolderError):  # a full disk may be the reason for the failure
        journal.record_event("coordinator", f"the run {SAID[finish.outcome]}{detail}")


class RunAttempts:
    """The attempts of a run, one after the other, and the processes that outlive them."""

    def __init__(self, invocation: CommandInvocation, opened: OpenedResources) -> None:
        self._invocation = invocation
        self._opened = opened
        self._config = invocation.ready.config
        self._num_steps = invocation.ready.algorithm.num_steps
        self._lasting = lasting(invocation, opened)
        self._registry = self._lasting.registry
        self._origin = _origin(invocation)
        self._note = invocation.say
        """Function that prints a line, and records it while an attempt is in progress."""
        self._live: LiveFile | None = None
        """Live file of the last attempt."""
        self._limits = RestoreLimits(newest_proven=None)
        """Limits on restored samples, from the journal before it dropped later records."""
        self._failures = ProcessFailures()
        supervision = invocation.supervision
        self._snapshot = RunSnapshot(
            live_snapshot=LiveSnapshot(began_at=time.monotonic()),
            replaced_at=() if supervision is None else supervision.begun.replaced_at,
            next_command_id=find_first_command_id(opened),
            has_started=opened.earlier is not None and opened.journal.last_step() is not None,
            departed=() if opened.earlier is None else opened.earlier.departed,
        )

    def run(self) -> FinishRun:
        """Run from the newest checkpoint, or the requested one, to the end; or find that nothing is to be done.

        Raise `DamagedCheckpoint` if that checkpoint is damaged.
        """
        journal, say = self._opened.journal, self._invocation.say
        if self._config.evaluates and journal.last_step() is not None:
            say(f"nothing to do: {journal.folder} has been evaluated, or trained on")
            return FinishRun(outcome="finished")
        start = self._find_start(self._invocation.from_step)
        if start != self._origin:
            say(f"resuming at step {start.first_step} from {start.resume_from}")
        if self._is_done(start):
            say(f"nothing to do: {journal.folder} has all of its {self._num_steps} steps")
            return FinishRun(outcome="finished")
        say(describe_processes(self._config, self._opened.listening))
        if self._config.logger.tensorboard_enabled:
            folder = journal.folder / self._config.logger.tensorboard.log_dir
            self._opened.writers.add(TensorBoardWriter(folder, start.first_step))
        outcome: Outcome = "failed"
        # While a new process starts, the others must still get their heartbeats.
        fork_server = self._invocation.fork_server
        with (
            signals.hear_signals(self._lasting.interrupts.hear),
            fork_server.call_meanwhile(self._registry.beat),
            self._registry.beat_in_disk_waits(),
        ):
            try:
                finish = self._carry_out_all(start)
                outcome = finish.outcome
            finally:
                self._stop(outcome)
        by_itself = outcome == "interrupted" and not self._lasting.interrupts.were_heard
        if by_itself and self._lasting.interrupts.is_goal_reached:
            return msgspec.structs.replace(finish, outcome="finished")
        return msgspec.structs.replace(finish, is_out_of_time=by_itself)

    def _expect_back(self) -> list[str]:
        """Take over the processes of a lost coordinator that wait for the next one.

        Return the names of those that are launched here.
        """
        supervision, launched = self._invocation.supervision, _list_launched(self._config)
        kept_pids = {} if supervision is None else supervision.begun.kept
        earlier = self._opened.earlier or known_processes.ProcessesSnapshot(address="")
        earlier = earlier.release_names([name for name in launched if name not in kept_pids])
        present = [name for name in launched if name in earlier.staying]
        if supervision is not None:
            for name, pid in kept_pids.items():
                if name in present:
                    self._lasting.processes.take_up(name, earlier.staying[name], supervision.child(pid))
                else:
                    self._lasting.processes.end(supervision.child(pid))
        self._registry.names.send_away(earlier.leaving)
        self._registry.names.expect_back(earlier.staying, present)
        if self._opened.earlier is not None:
            reason = "" if supervision is None else supervision.begun.why
            names = " and ".join(earlier.staying)
            message = f"coordinator is lost: {reason or 'the cause is unknown'}; another goes on with the run"
            message += f", and expects {names} back" if names else ""
            self._invocation.say(message)
            self._opened.journal.record_event("coordinator", message)
        return present

    def _carry_out_all(self, start: StartingPoint) -> FinishRun:
        """Start what is launched here, and carry out one attempt after another; return how the last one ended."""
        present = self._expect_back()
        for kind, count in nodes.launched_processes(self._config).items():
            absent = [index for index in range(count) if f"{kind}-{index}" not in {*present, *self._snapshot.departed}]
            self._registry.names.reserve(*(self._lasting.processes.start(kind, index) for index in absent))
        while True:
            finish, lost = self._carry_out(start)
            if not lost:
                return finish
            start = self._start_again(lost)
            if self._is_done(start):
                return FinishRun(outcome="finished")
            self._opened.writers.go_back_to(start.first_step)

    def _is_done(self, start: StartingPoint) -> bool:
        return start.first_step > self._num_steps and not self._config.evaluates

    # --- where an attempt begins -------------------------------------------------------------------------------------

    def _find_start(self, from_step: int | None = None) -> StartingPoint:
        """Return where to continue; the journal then drops all later steps."""
        checkpoints = self._checkpoints()
        if self._config.checkpointing.enabled:
            checkpoints.prepare()
        self._limits = limits_of(self._config, self._opened.journal)
        return self._resuming(checkpoints).start(from_step)

    def _checkpoints(self) -> CheckpointFolder:
        config = self._config.checkpointing
        return CheckpointFolder(
            Path(config.checkpoint_dir),
            keep_top_k=config.keep_top_k,
            higher_is_better=config.higher_is_better,
            run_id=self._opened.journal.run_id,
            late_metrics=None if self._opened.evaluations is None else self._opened.evaluations.late_metrics,
        )

    def _resuming(self, checkpoints: CheckpointFolder) -> ResumePoints:
        return ResumePoints(self._config, self._opened.journal, checkpoints, self._note, self._origin)

    # --- an attempt --------------------------------------------------------------------------------------------------

    def _carry_out(self, start: StartingPoint) -> tuple[FinishRun, dict[str, str]]:
        """Carry out an attempt; return its outcome, and the processes to replace for the next one, if any."""
        checkpoints = self._checkpoints()
        with contextlib.ExitStack() as stack:
            loop, self._live = assemble(
                self._invocation, self._opened, self._lasting, self._snapshot, checkpoints, start, self._limits, stack
            )
            self._note = loop.recorder.note
            resuming = self._resuming(checkpoints)
            try:
                finish = self._run_loop(loop)
                damage = resuming.damage_in(finish, start)
            except errors.DamagedCheckpoint as damaged:
                damage = damaged
            if damage is not None:
                self._stop("failed")  # first, since reading other checkpoints takes a while
                raise resuming.add_way_out(damage, start.first_step - 1)
            return finish, self._find_replaceable(finish, loop)

    def _run_loop(self, loop: CoordinatorLoop) -> FinishRun:
        supervision = self._invocation.supervision
        try:
            return loop.run()
        finally:
            if supervision is not None:
                supervision.leave_loop()

    def _find_replaceable(self, finish: FinishRun, loop: CoordinatorLoop) -> dict[str, str]:
        """Return the lost processes, with the reasons, if the run can go on without them; empty if not."""
        tables = loop.scheduler.tables
        self._snapshot = msgspec.structs.replace(
            self._snapshot,
            next_command_id=tables.requests.next_command_id,
            replaced_at=(*self._snapshot.replaced_at, *loop.losses.replaced_at),
            has_started=self._snapshot.has_started or tables.steps.has_started,
            departed=tuple(sorted(tables.engines.departed)),
        )
        # A process that does not reach the first step would not reach it the next time.
        if finish.error is None or not self._snapshot.has_started or tables.steps.is_interrupted:
            return {}
        lost = self._lost_with(finish.error, tables.step)
        if not lost:
            return {}
        lost |= loop.losses.lost
        num_lost = len({"trainers" if _is_trainer(name) else name for name in lost})
        cluster, now = self._config.cluster, time.monotonic()
        recent = child.select_within(cluster.replacement_window_s, now, self._snapshot.replaced_at)
        if len(recent) + num_lost > cluster.max_replacements:
            return {}
        loop.recorder.observers.replaced(num_lost)
        self._snapshot = msgspec.structs.replace(self._snapshot, replaced_at=(*recent, *[now] * num_lost))
        return lost

    def _lost_with(self, error: errors.ServiceError, step: int) -> dict[str, str]:
        """Return the lost process behind an error, with the reason; empty if the error has another cause."""
        if error.process == "coordinator" or error.phase == EngineStatus.ABSENT.value:  # a process never joined
            return {}
        if isinstance(error, errors.ServiceLost | errors.DeadlineExceeded):
            return {error.process: error.what}
        # After one rank is lost, others fail at once; the loss of one started by hand is noticed later.
        peers = [name for name in self._registry.processes if _is_trainer(name) and name != error.process]
        if not isinstance(error, errors.CommandFailed) or not _is_trainer(error.process):
            return {}
        if not all(map(self._lasting.processes.has_launched, peers)) and (lost := self._silent_among(peers)):
            return lost
        error_line = error.what.splitlines()[0]
        if error.is_final or not self._failures.is_new("trainers", step, error_line):
            return {}
        return {error.process: f"it failed while {error.phase}: {error_line}"}

    def _silent_among(self, names: Sequence[str]) -> dict[str, str]:
        """Wait until one of these processes falls silent; return it with the reason, or nothing after `patience_s`."""
        patient_until = time.monotonic() + self._registry.patience_s
        while time.monotonic() < patient_until and not self._lasting.interrupts.are_there:
            for event in self._registry.receive(_POLL_S):
                if isinstance(event, ProcessLost) and event.process in names:
                    return {event.process: event.reason}
        return {}

    # --- between two attempts ----------------------------------------------------------------------------------------

    def _start_again(self, lost: Mapping[str, str]) -> StartingPoint:
        """Start all trainers and other lost processes again; return where they begin."""
        message = "; ".join(f"{name} is lost: {reason}" for name, reason in lost.items())
        try:
            trainers = [f"trainer-{index}" for index in range(self._config.num_trainers)]
            names = [*dict.fromkeys([*trainers, *lost])]
            for name in names:
                self._registry.dismiss(name, lost.get(name, _AGAIN))
            launched = self._lasting.processes.restart(names)
            self._registry.names.reserve(*launched)
            start = self._find_start()
        except BaseException:
            self._note(message)
            raise
        kinds = [name.rpartition("-")[0] for name in {*names} - {each.name for each in launched}]
        by_hand = "".join(
            f"; {kinds.count(kind)} to be started by hand: {self._registry.describe_joining(kind)}"
            for kind in dict.fromkeys(kinds)
        )
        origin = f"the checkpoint {start.resume_from}" if start.resume_from else "the model that the run began with"
        self._note(
            f"{message}; all trainers are started again{by_hand}; "
            f"the run goes on at step {start.first_step} from {origin}"
        )
        if self._live is not None:
            self._snapshot = msgspec.structs.replace(self._snapshot, live_snapshot=self._live.snapshot)
        return start

    def _stop(self, outcome: Outcome) -> None:
        """End every process: ask, wait, kill."""
        self._registry.broadcast(
            messages.Shutdown(reason=f"the run {'' if outcome == 'finished' else 'was '}{outcome}")
        )
        self._lasting.known_processes.end()
        self._lasting.processes.stop(grace_s=_GRACE_AFTER_FAILURE_S if outcome == "failed" else _GRACE_S)


def _list_launched(config: Config) -> list[str]:
    return [f"{kind}-{index}" for kind, count in nodes.launched_processes(config).items() for index in range(count)]


def _is_trainer(name: str) -> bool:
    return name.startswith("trainer-")


def _origin(invocation: CommandInvocation) -> StartingPoint:
    """Return where a run without a checkpoint begins."""
    if invocation.ready.config.replay is None:
        return FROM_THE_MODEL
    from tandem.coordinator.preparing.replay import origin_of

    return origin_of(invocation.ready.config)
