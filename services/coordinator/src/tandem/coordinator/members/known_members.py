"""Members that outlive their coordinator: a list on disk, from which the next one takes them up.

Engines and the refit service keep what they have, wait where their coordinator was (``cluster.orphan_timeout_s``), and
are known again by their keys. Trainers are told to go: they start anew, as in any term. So is everybody where the
configuration is not that which they were made with, or a Python program scores samples, which is another one now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from tandem.common.keys import AdmittedMembers, Key, forget_admitted, read_admitted, write_admitted
from tandem.config import Config, config_to_json
from tandem.observe.run_folder.journal import read_journal

SUPERVISED_S = 300.0
"""How long services wait for the next coordinator where there will be one, unless the configuration says."""


class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a coordinator that was lost."""

    address: str
    """Where they look for the next one."""
    staying: Mapping[str, Key] = {}
    """Those that are taken up, by their names."""
    leaving: tuple[Key, ...] = ()
    """The keys of those that are told to go."""
    departed: tuple[str, ...] = ()
    """Engines that had left before it was lost: nobody waits for others in their places."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of all of them."""
        return (*self.staying.values(), *self.leaving)

    def without(self, names: Collection[str]) -> Earlier:
        """Return the same, but that others take the places with these names."""
        staying = {name: key for name, key in self.staying.items() if name not in names}
        gone = (key for name, key in self.staying.items() if name in names)
        return msgspec.structs.replace(self, staying=staying, leaving=(*self.leaving, *gone))


def orphan_timeout_s(config: Config, *, is_supervised: bool) -> float:
    """Return how long services wait for the next coordinator."""
    configured = config.cluster.orphan_timeout_s
    if configured is not None:
        return configured
    return SUPERVISED_S if is_supervised else 0.0


def find_earlier(config: Config, *, has_rewards: bool) -> Earlier | None:
    """Return the members of the coordinator that was lost, of a run that goes on; None if none was.

    `has_rewards` says whether a Python program scores samples. Raises `ConfigError` for a list that others can change.
    """
    folder = Path(config.logger.log_dir)
    if (admitted := read_admitted(folder)) is None:
        return None
    with read_journal(folder) as journal:
        is_same = journal.config_json == config_to_json(config) and not has_rewards
    staying = {name: key for name, key in admitted.members.items() if is_same and name.rpartition("-")[0] != "trainer"}
    leaving = tuple(key for name, key in admitted.members.items() if name not in staying)
    return Earlier(address=admitted.address, staying=staying, leaving=leaving, departed=admitted.departed)


class KnownMembers:
    """The list on disk of who is admitted, where services wait for another coordinator; else there is none."""

    def __init__(self, run: Path, address: str, *, is_kept: bool, earlier: Earlier | None = None) -> None:
        """`earlier` are on it already."""
        self._run = run
        self._address = address
        self._is_kept = is_kept
        self._members: dict[str, Key] = {} if earlier is None else dict(earlier.staying)
        self._departed: set[str] = set() if earlier is None else {*earlier.departed}
        if not is_kept:
            forget_admitted(run)

    def note(self, name: str, key: Key) -> None:
        """Put a process on it, in the place of another of the name. Raises `ConfigError`."""
        if self._members.get(name) != key:
            self._members[name] = key
            self._departed.discard(name)
            self._write()

    def forget(self, name: str, *, has_left: bool = False) -> None:
        """Take a process off it, if it is there, or note that it has left for good. Raises `ConfigError`."""
        was_there = self._members.pop(name, None) is not None
        if was_there or (has_left and name not in self._departed):
            self._departed |= {name} if has_left else set()
            self._write()

    def end(self) -> None:
        """Have no list any more: whoever is there is told to go."""
        self._is_kept = False
        forget_admitted(self._run)

    def _write(self) -> None:
        if self._is_kept:
            departed = tuple(sorted(self._departed))
            write_admitted(self._run, AdmittedMembers(address=self._address, members=self._members, departed=departed))
