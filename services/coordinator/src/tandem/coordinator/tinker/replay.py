"""The replay of calls: what clients have done to each model, once more, compared to the bit.

Each file of calls is a model. A thread puts its calls on the desk, in the order in which they were carried out, and
compares what comes back: losses, norms, log-probabilities, and the tensors of saved states. A state that a client has
loaded is the one that the replay itself has saved, if it is equal, and otherwise the one in its place, if that is what
it was.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, assert_never

import msgspec

from tandem.common import signals
from tandem.common.errors import FAILED, INTERRUPTED, OK, ConfigError, DeadlineExceeded, RunFolderError, TandemError
from tandem.config import Config, change_config, notices
from tandem.coordinator.loop.loop import CoordinatorLoop
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.preparing import replay
from tandem.coordinator.scheduler.events import Event, FinishRun
from tandem.coordinator.tinker.driving import NoAlgorithm, TinkerFrontEnd
from tandem.coordinator.tinker.loop import CallLoop
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.launch import preload
from tandem.launch.nodes import launched_processes
from tandem.observe.run_folder.checkpoints import config_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_file import CONFIG_NAME
from tandem.serving.tinker import call_files
from tandem.serving.tinker.calls import Answer, Call, CallDesk, CallFailed, GradientsScored, RestoreState, SaveState

_STATES = "states"
_CHANGEABLE = ("cluster", "logger", "policy")


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a model."""

    path: Path
    run_id: str
    head: call_files.CallHead
    loaded: frozenset[str]
    """Digests of the states that its client has loaded."""
    why_over: str
    """Why the record ends before the model did; empty if it does not."""

    def calls(self) -> Iterator[call_files.Done]:
        """Read the calls. Raises `RunFolderError`."""
        _, calls = call_files.read(self.path, self.run_id)
        return (each for each in calls if not isinstance(each, call_files.RecordEnd))


def replay_calls(run: Path, overrides: Sequence[str]) -> int:
    """Replay the calls of a run; return the exit code. Raises `TandemError`."""
    with read_journal(run) as journal:
        before, run_id = config_of(journal), journal.run_id
    records = read_records(run, run_id)
    settings = {
        "checkpointing": {"checkpoint_dir": None},
        "logger": {"log_dir": str(replay.new_folder(run)), "tensorboard": {"log_dir": "tensorboard"}},
        "replay": {"run": str(run), "run_id": run_id, "from_step": 0, "to_step": 1},
    }
    changed = change_config(before, settings, overrides, str(run / CONFIG_NAME))
    for key in changed.keys:
        if replay.is_within(key, replay.REFUSED) or not replay.is_within(key, _CHANGEABLE):
            reason = next(
                (replay.REFUSED[name] for name in replay.REFUSED if replay.is_within(key, (name,))),
                "it changes nothing on calls",
            )
            raise ConfigError(f"command line: {key}: cannot be changed in a replay: {reason}")
    replay.refuse_folders(changed.config)
    folder = Path(changed.config.logger.log_dir)
    print(f"{folder} is a replay of {run}: the calls of {_models(len(records))}", flush=True)
    doing = Doing(records, folder / _STATES, changed.config)
    finish = _run(replay.source_of(run), changed.config, doing)
    shutil.rmtree(folder / _STATES, ignore_errors=True)
    if finish.outcome == "interrupted":
        print("interrupted", flush=True)
        return INTERRUPTED
    error = doing.error or finish.error
    for comparison in doing.comparisons if error is None else doing.comparisons[:-1]:
        print(comparison.describe(run, changed.keys), flush=True)
    if error is not None:
        raise error
    are_equal = all(comparison.is_equal for comparison in doing.comparisons)
    return OK if finish.outcome == "finished" and (are_equal or changed.keys) else FAILED


def read_records(run: Path, run_id: str) -> list[Recorded]:
    """Read the records of all models, the first begun first. Raises `RunFolderError`."""
    records = []
    for path in (run / call_files.FOLDER).glob(f"*{call_files.SUFFIX}"):
        head, calls = call_files.read(path, run_id)
        why_over, loaded = "", set[str]()
        for call in calls:
            if isinstance(call, call_files.RecordEnd):
                why_over = call.why
            elif isinstance(call, call_files.RestoreDone) and call.state:
                loaded.add(call.state)
        records.append(Recorded(path=path, run_id=run_id, head=head, loaded=frozenset(loaded), why_over=why_over))
    if not records:
        raise RunFolderError(f"{run} has no record of calls: see coordinator tinker --record")
    return sorted(records, key=lambda record: record.head.began_at)


class Doing:
    """The thread that does all calls again. Once it is done, the run ends."""

    def __init__(self, records: Sequence[Recorded], states: Path, config: Config) -> None:
        self.desk = CallDesk()
        self.comparisons: list[call_files.CallComparison] = []
        self.error: TandemError | None = None
        self.is_done = False
        self._records = records
        self._states = states
        deadlines = config.cluster.deadlines
        self._longest_s = deadlines.join_s + deadlines.build_s + 2 * max(deadlines.train_s, deadlines.save_s)
        """Time for an answer: trainers may have to start first."""
        self._loaded = frozenset[str]().union(*(each.loaded for each in records))
        self._saved: dict[str, Path] = {}
        """States that the replay has saved and will load, by digest."""
        self._num_saved = 0
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def start(self) -> None:
        """Begin; calls wait until trainers are there."""
        self._thread.start()

    def _run(self) -> None:
        try:
            for record in self._records:
                comparison = call_files.CallComparison(record.head.model, record.why_over)
                self.comparisons.append(comparison)
                for entry in record.calls():
                    if not self._do(record, entry, comparison):
                        break
        except TandemError as error:
            self.error = error
        finally:
            self.is_done = True

    def _do(self, record: Recorded, entry: call_files.Done, comparison: call_files.CallComparison) -> bool:
        """Do a call again; tell whether the model can go on."""
        match entry:
            case call_files.GradientDone():
                try:
                    call = call_files.call_of(entry)
                except ValueError as error:
                    raise RunFolderError(f"{record.path} is damaged: call {entry.index}: {error}") from error
                answer = self._ask(call)
                scored = answer if isinstance(answer, GradientsScored) else None
                comparison.compare_gradient(entry, scored, _error_of(answer))
            case call_files.StepDone():
                answer = self._ask(entry.step)
                comparison.compare_step(entry, answer if isinstance(answer, float) else None, _error_of(answer))
            case call_files.RestoreDone():
                if entry.error:
                    return False  # its weights were undefined since then
                answer = self._ask(self._state_to_load(entry, record))
                comparison.note_restored(entry, _error_of(answer))
            case call_files.SaveDone():
                if not entry.error:  # else nothing was saved, and nothing has changed
                    comparison.compare_saved(entry, *self._save(entry))
            case _:
                assert_never(entry)
        return not comparison.has_failed

    def _ask(self, call: Call) -> Answer | CallFailed:
        answers = SimpleQueue[Answer | CallFailed]()
        self.desk.put(call, answers.put)
        try:
            return answers.get(timeout=self._longest_s)
        except Empty:
            reason = f"no answer has come within {self._longest_s:g} s"
            raise DeadlineExceeded("trainer-0", f"doing {type(call).__name__} again", reason) from None

    def _save(self, entry: call_files.SaveDone) -> tuple[str, str]:
        """Save the state; return its digest, and why that failed."""
        self._states.mkdir(parents=True, exist_ok=True)
        self._num_saved += 1
        folder = self._states / str(self._num_saved)
        call = SaveState(folder=str(folder.absolute()))
        answer = self._ask(call)
        state = call_files.digest_of_state(call)
        if state in self._loaded and state not in self._saved:
            self._saved[state] = folder
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return state, _error_of(answer)

    def _state_to_load(self, entry: call_files.RestoreDone, record: Recorded) -> RestoreState:
        """Return the call that loads what a client has loaded. Raises `RunFolderError` if it is not there any more."""
        if not entry.folder:
            return RestoreState(folder="", with_optimizer=False)
        saved = self._saved.get(entry.state)
        folder = entry.folder if saved is None else str(saved.absolute())
        call = RestoreState(folder=folder, with_optimizer=entry.with_optimizer)
        if call_files.digest_of_state(call) != entry.state:
            now = "is another one by now" if Path(folder).exists() else "is not there any more"
            raise RunFolderError(
                f"{record.head.model} cannot be replayed beyond call {entry.index}, which loads a state: {folder} {now}"
            )
        return call


class ReplayFrontEnd(TinkerFrontEnd):
    """A front end whose client is the record."""

    def __init__(self, doing: Doing, config: Config) -> None:
        super().__init__(doing.desk, config, doing.start)
        self._doing = doing

    def display(self) -> Observer:
        """Return an observer that prints what happens to the processes."""
        return _Notes()

    def loop(self, *parts: Any) -> CoordinatorLoop:
        """Return a loop that ends once all calls are done."""
        self.begin()
        return _ReplayLoop(self._doing, self._config, *parts)


class _Notes(Observer):
    """The console of a replay of calls."""

    def noted(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)


class _ReplayLoop(CallLoop):
    """The loop of a replay of calls."""

    def __init__(self, doing: Doing, config: Config, *parts: Any) -> None:
        super().__init__(doing.desk, config, lambda: None, *parts)
        self._doing = doing

    def _events(self) -> Iterator[Event]:
        if self._doing.is_done and not self._interrupts.is_goal_reached:
            self._interrupts.reach("all calls are done")
        yield from super()._events()


def _run(source: str, config: Config, doing: Doing) -> FinishRun:
    """Run until all is done again. Raises `TandemError`."""
    for notice in notices(config):
        print(f"note: {notice}", flush=True)
    signals.interrupt_when_asked()
    kinds = [kind for kind, count in launched_processes(config).items() if count]
    try:
        # First: it must have no threads.
        with ServiceForkServer(partial(preload, kinds, None), config.cluster.deadlines.join_s) as fork_server:
            from tandem.coordinator.loop.opening import CommandInvocation
            from tandem.coordinator.loop.run import run
            from tandem.coordinator.preparing.preflight import preflight

            ready = preflight(source, config, "new", make=NoAlgorithm)
            front_end = ReplayFrontEnd(doing, ready.config)
            invocation = CommandInvocation(
                ready=ready,
                mode="new",
                say=partial(print, flush=True),
                fork_server=fork_server,
                front_end=front_end,
            )
            return run(invocation)
    except KeyboardInterrupt:  # before the loop began, which takes it for itself
        return FinishRun(outcome="interrupted")
    finally:
        doing.desk.close("the run has ended", is_over=True)


def _error_of(answer: Answer | CallFailed) -> str:
    return str(answer) if isinstance(answer, CallFailed) else ""


def _models(count: int) -> str:
    return "one model" if count == 1 else f"{count} models"
