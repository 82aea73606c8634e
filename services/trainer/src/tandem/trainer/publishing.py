"""A trainer that writes each version to a store, where ``refit.store`` names one."""

from __future__ import annotations

from tandem.common import messages, wire
from tandem.launch.service import ServiceContext
from tandem.refit import program
from tandem.refit.store.objects import ObjectStore
from tandem.refit.store.publisher import StoreAccess, StorePublisher
from tandem.trainer.service import TrainerService


class PublishingTrainer(TrainerService):
    """One rank's replies to the coordinator; what it copies for engines of its host, it also publishes."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        refit = context.config.refit
        assert refit.store is not None, "it is configured where this is used"
        access = StoreAccess(ObjectStore(refit.store), context.store_key, context.run_id)
        self._publisher = StorePublisher(access, refit.store_whole_every, lambda line: print(line, flush=True))

    def handle(self, command: messages.TrainerCommand, arrays: wire.Arrays) -> None:
        """Carry out one command and reply."""
        if isinstance(command, messages.InstallProgram):
            weights = self._built().weights
            assert weights is not None, "the coordinator sends this to trainers of the policy"
            (installed,) = map(program.decode, command.programs)
            self._publisher.bind(installed.member, weights.layout, weights.live, installed.verification)
        elif isinstance(command, messages.CopyWeights):
            with self._context.phase(f"publishing version {command.version}"):
                self._publisher.publish(command.version)
        super().handle(command, arrays)

    def close(self) -> None:
        """Remove what was published, and leave the groups."""
        self._publisher.close()
        super().close()
