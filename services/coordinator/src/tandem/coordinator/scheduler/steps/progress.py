"""The table of steps: how far the step in progress is, and how far the run."""

from __future__ import annotations

import enum

from tandem.coordinator.scheduler.agenda import Changed, Tracked


class StepState(enum.IntEnum):
    """How far the step in progress is. Each state comes after those before it."""

    GENERATING = 0
    """Its groups are generated, or its batch waits."""
    TRAINING = 1
    TRAINED = 2
    """The optimizer has stepped. The weights that a run starts with count as a trained step."""
    VALIDATING = 3
    VALIDATED = 4
    """Validation is done, or given up, or was not due."""
    COMMITTED = 5
    """The step is in the journal."""


class StepProgress(Tracked):
    """The state of the step in progress, except for its groups."""

    def __init__(self, number: int, changed: Changed, state: StepState = StepState.GENERATING) -> None:
        super().__init__(changed)
        self.number = number
        self.state = state
        self.missing: dict[str, str] = {}
        """Engines that trainers could not fetch samples from, with the reason, until all ranks have said so."""
        self.num_fetches = 0
        """The times that trainers were asked to fetch the step's samples."""
        self.has_update = False
        """Whether the step must have changed the weights."""


class RunSteps(Tracked):
    """The step in progress, and how far the run is."""

    def __init__(self, first_step: int, changed: Changed) -> None:
        super().__init__(changed)
        self.progress = StepProgress(first_step - 1, changed, StepState.TRAINED)
        self.has_started = False
        """Whether the weights to start from have reached the engines."""
        self.drawn = first_step - 1
        """The newest step with groups drawn."""
        self.saved = first_step - 1
        """The newest step that trainers have copied, or that the run began with."""
        self.is_interrupted = False

    def begin(self, number: int) -> None:
        """Begin a step."""
        self.progress = StepProgress(number, self._changed)

    def go_back(self) -> None:
        """Go back to the end of the step before, which was done."""
        self.progress = StepProgress(self.progress.number - 1, self._changed, StepState.COMMITTED)
