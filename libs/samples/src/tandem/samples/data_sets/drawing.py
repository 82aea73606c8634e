"""The choice of the data set that each place is drawn from: by weights, in turn, or by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tandem.common.dotted import named
from tandem.common.errors import DataError
from tandem.common.returned import line, shown
from tandem.config import Config
from tandem.config.schema import DataConfig
from tandem.config.schema.data import set_names

_KEY = "data.custom_dataloader"
_FINEST = 1000
"""Most places of a pattern, to which weights are rounded."""


class DrawingPattern:
    """Sets that take their places in a repeated pattern."""

    def __init__(self, pattern: tuple[int, ...]) -> None:
        self._pattern = pattern
        self._counts = [0] * (max(pattern) + 1)
        self._ranks: list[int] = []
        """For each place, the number of earlier places with the same set."""
        for number in pattern:
            self._ranks.append(self._counts[number])
            self._counts[number] += 1

    def locate(self, position: int) -> tuple[int, int]:
        """Return the set of a place of the stream, and the place within that set's stream."""
        cycle, place = divmod(position, len(self._pattern))
        number = self._pattern[place]
        return number, cycle * self._counts[number] + self._ranks[place]


class ChosenSets:
    """Sets that a user's function chooses (``data.custom_dataloader``), step by step."""

    def __init__(self, config: Config, sizes: Sequence[int]) -> None:
        """Import the function. Raise `ConfigError` if that fails."""
        self._path = str(config.data.chooser)
        self._choose: Callable[..., object] = named(self._path, _KEY)
        self._sizes = dict(zip(set_names(config.data.train), sizes, strict=True))
        self._per_step = config.rollout_section.num_prompts_per_batch
        self._numbers = {name: number for number, name in enumerate(self._sizes)}
        self._steps: list[list[int]] = []
        """For each step, the sets of its places."""
        self._before = [[0] * len(sizes)]
        """For each step, the number of items drawn from each set before it."""

    def locate(self, position: int) -> tuple[int, int]:
        """Return the set of a place, and the place within that set's stream. Raise `DataError` if choosing fails."""
        step, place = divmod(position, self._per_step)
        while len(self._steps) <= step:
            sets = self._call_chooser(len(self._steps) + 1)
            self._steps.append(sets)
            self._before.append([count + sets.count(n) for n, count in enumerate(self._before[-1])])
        sets = self._steps[step]
        return sets[place], self._before[step][sets[place]] + sets[:place].count(sets[place])

    def _call_chooser(self, step: int) -> list[int]:
        function_name = f"{_KEY}: {self._path}"
        try:
            returned = self._choose(step, dict(self._sizes), self._per_step)
        except Exception as error:  # the function is the user's
            raise DataError(
                f"{function_name} raised {type(error).__name__} for step {step}: {line(str(error))}"
            ) from error
        names = [*returned] if isinstance(returned, list | tuple) else []
        if len(names) != self._per_step or any(name not in self._numbers for name in names):
            raise DataError(
                f"{function_name} returned {shown(returned)} for step {step}, not {self._per_step} names of data sets "
                f"({', '.join(self._numbers)})"
            )
        return [self._numbers[name] for name in names]


def drawing_pattern(data: DataConfig, num_sets: int) -> tuple[int, ...]:
    """Return the set of each place in the repeated pattern; zeros where the sets are drawn from as one."""
    if len(data.train) != num_sets or num_sets < 2:
        return (0,)
    if data.use_multiple_dataloader and data.chooser is None:
        num_prompts = data.num_prompts_per_dataloader or 1
        return tuple(number for number in range(num_sets) for _ in range(num_prompts))
    if all(each.weight is None for each in data.train):
        return (0,)
    return _spread([1.0 if each.weight is None else each.weight for each in data.train])


def _spread(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the shortest pattern with these proportions, each spread evenly; every set has at least one place."""
    shares = [weight / sum(weights) * _FINEST for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda number: int(shares[number]) - shares[number])
    for number in by_rest[: max(0, _FINEST - sum(counts))]:
        counts[number] += 1
    divisor = math.gcd(*counts)
    places = [
        ((place + 0.5) / (count // divisor), number)
        for number, count in enumerate(counts)
        for place in range(count // divisor)
    ]
    return tuple(number for _, number in sorted(places))
