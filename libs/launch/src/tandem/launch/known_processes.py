"""Processes that outlive their coordinator: a list on disk, from which the next one takes them over.

Engines and the refit service keep their state, wait at the coordinator's address (``cluster.orphan_timeout_s``), and
are recognised by their keys. Trainers are told to exit, and start anew as in any attempt. So is every process if the
configuration has changed, or if a Python program scores samples, since that program is a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from tandem.common.keys import AdmittedProcesses, Key, forget_admitted, read_admitted, write_admitted
from tandem.config import Config, config_to_json
from tandem.observe.run_folder.journal import read_journal

SUPERVISED_S = 300.0
"""Default time that services wait for the next coordinator, if the run is supervised."""


class ProcessesSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a lost coordinator."""

    address: str
    """Address at which they look for the next one."""
    staying: Mapping[str, Key] = {}
    """Processes that are taken over, with their keys, by name."""
    leaving: tuple[Key, ...] = ()
    """Keys of processes that are told to exit."""
    departed: tuple[str, ...] = ()
    """Engines that had left before; they are not replaced."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of all of them."""
        return (*self.staying.values(), *self.leaving)

    def release_names(self, names: Collection[str]) -> ProcessesSnapshot:
        """Return the same, with these processes among the leaving, so that others may take their names."""
        staying = {name: key for name, key in self.staying.items() if name not in names}
        gone = (key for name, key in self.staying.items() if name in names)
        return msgspec.structs.replace(self, staying=staying, leaving=(*self.leaving, *gone))


def orphan_timeout_s(config: Config, *, is_supervised: bool) -> float:
    """Return how long services wait for the next coordinator."""
    configured = config.cluster.orphan_timeout_s
    if configured is not None:
        return configured
    return SUPERVISED_S if is_supervised else 0.0


def find_earlier(config: Config, *, has_rewards: bool) -> ProcessesSnapshot | None:
    """Return the processes of a lost coordinator of the run to resume; None if there are none.

    `has_rewards` says whether a Python program scores samples. Raise `ConfigError` if other users can change the list.
    """
    folder = Path(config.logger.log_dir)
    if (admitted := read_admitted(folder)) is None:
        return None
    with read_journal(folder) as journal:
        is_same = journal.config_json == config_to_json(config) and not has_rewards
    staying = {
        name: key for name, key in admitted.processes.items() if is_same and name.rpartition("-")[0] != "trainer"
    }
    leaving = tuple(key for name, key in admitted.processes.items() if name not in staying)
    return ProcessesSnapshot(address=admitted.address, staying=staying, leaving=leaving, departed=admitted.departed)


class KnownProcesses:
    """The list of admitted processes on disk, kept only if services wait for another coordinator."""

    def __init__(self, run: Path, address: str, *, is_kept: bool, earlier: ProcessesSnapshot | None = None) -> None:
        """Begin with the processes of `earlier` on the list."""
        self._run = run
        self._address = address
        self._is_kept = is_kept
        self._processes: dict[str, Key] = {} if earlier is None else dict(earlier.staying)
        self._departed: set[str] = set() if earlier is None else {*earlier.departed}
        if not is_kept:
            forget_admitted(run)

    def note(self, name: str, key: Key) -> None:
        """Put a process on the list, in place of another of that name. Raise `ConfigError` if that fails."""
        if self._processes.get(name) != key:
            self._processes[name] = key
            self._departed.discard(name)
            self._write()

    def forget(self, name: str, *, has_left: bool = False) -> None:
        """Take a process off the list, or note that it has left for good. Raise `ConfigError` if that fails."""
        was_there = self._processes.pop(name, None) is not None
        if was_there or (has_left and name not in self._departed):
            self._departed |= {name} if has_left else set()
            self._write()

    def end(self) -> None:
        """Delete the list: the remaining processes are told to exit."""
        self._is_kept = False
        forget_admitted(self._run)

    def _write(self) -> None:
        if self._is_kept:
            departed = tuple(sorted(self._departed))
            write_admitted(
                self._run, AdmittedProcesses(address=self._address, processes=self._processes, departed=departed)
            )
