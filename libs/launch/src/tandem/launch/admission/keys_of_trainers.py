"""The keys of trainers, which may fetch samples: engines are told them whenever they change."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.common import wire
from tandem.common.curve import AdmittedKeys
from tandem.common.messages import TrainerKeys
from tandem.launch.admission.admission import RegisteredProcess


class KeysOfTrainers:
    """The keys of a run's trainers, and whether all engines know them."""

    def __init__(self, hub: wire.Hub, processes: Mapping[str, RegisteredProcess]) -> None:
        """Take the way to the processes, and those that there are, by name."""
        self._hub = hub
        self._processes = processes
        self.admitted = AdmittedKeys()
        """Keys of all trainers."""
        self._number = 0
        """Number of changes of these."""
        self.are_told = True

    def note(self, changed: RegisteredProcess) -> None:
        """Admit the current trainers, and no others, to the samples."""
        if changed.hello.service == "trainer":
            self.admitted.replace(m.peer.key for m in self._processes.values() if m.hello.service == "trainer")
            self._number += 1
            self.are_told = False

    def tell(self) -> None:
        """Tell engines which trainers may fetch samples."""
        message = wire.encode(TrainerKeys(number=self._number, public_keys=self.admitted.keys()))
        for process in self._processes.values():
            if process.hello.service == "rollout" and process.trainer_keys < self._number:
                self._hub.send(process.peer, message)
                process.trainer_keys = self._number
        self.are_told = True
