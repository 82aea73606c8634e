"""Lengths of prompts and responses: of a rollout log, or drawn from a distribution of a given mean.

The distribution is an assumption, and the output states it: lengths are log-normal with a spread of `SPREAD`, a share
`RUNAWAYS` of responses never ends by itself, and all are cut at the longest that the configuration allows. Its median
is chosen so that the mean is as given after the cut.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import ConfigError

SPREAD = 0.6
"""Standard deviation of the logarithm of a length."""
RUNAWAYS = 0.005
"""Share of responses that end only where they are cut."""
_HALVINGS = 60


class GroupLengths(msgspec.Struct, frozen=True):
    """The tokens of one rollout group."""

    prompt: int
    responses: tuple[int, ...]


class LengthSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the lengths of groups come from."""

    recorded: tuple[GroupLengths, ...] = ()
    """Groups of a run, drawn again and again; none if lengths are drawn from a distribution."""
    prompt: int = 0
    mean: float = 0.0
    """Mean tokens of a response, after the cut."""
    longest: int = 0
    """Tokens that every response is cut at."""
    median: float = 0.0
    """Median of the distribution before the cut; infinite if all are cut."""
    spread: float = 0.0
    runaways: float = 0.0
    source: str
    """The source, for people."""

    def draw(self, step: int, group: int, num_samples: int, seed: int) -> GroupLengths:
        """Return the lengths of a group; the same for the same arguments."""
        generator = random.Random(f"{seed} {step} {group}")
        if self.recorded:
            lengths = generator.choice(self.recorded)
            if len(lengths.responses) == num_samples:
                return lengths
            return GroupLengths(lengths.prompt, tuple(generator.choices(lengths.responses, k=num_samples)))
        return GroupLengths(self.prompt, tuple(self._draw_response(generator) for _ in range(num_samples)))

    def _draw_response(self, generator: random.Random) -> int:
        if self.runaways and generator.random() < self.runaways:
            return self.longest
        length = self.median * math.exp(self.spread * generator.gauss(0.0, 1.0)) if self.spread else self.median
        return max(1, min(self.longest, round(length)))

    @property
    def even(self) -> LengthSource:
        """Responses that are all as long as the mean, for what tails cost."""
        mean = self.mean_response
        prompt = round(self.mean_prompt)
        return LengthSource(prompt=prompt, mean=mean, longest=max(1, round(mean)), median=mean, source="all alike")

    @property
    def mean_response(self) -> float:
        """Mean tokens of a response."""
        lengths = [length for group in self.recorded for length in group.responses]
        return sum(lengths) / len(lengths) if lengths else self.mean

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        prompts = [group.prompt for group in self.recorded]
        return sum(prompts) / len(prompts) if prompts else float(self.prompt)


def fit_lengths(
    mean: float, longest: int, prompt: int, *, spread: float = SPREAD, runaways: float = RUNAWAYS
) -> LengthSource:
    """Return a distribution of responses with this mean, cut at `longest`. Raise `ConfigError` if none has it."""
    if not 1 <= mean <= longest:
        raise ConfigError(
            f"--mean-length: {mean:g} tokens are not between 1 and {longest}, the longest response that the "
            "configuration allows"
        )
    if mean - runaways * longest < 1:
        runaways = 0.0
    mean_of_others = (mean - runaways * longest) / (1 - runaways)
    low, high = 0.0, longest * 1e6
    for _ in range(_HALVINGS):
        middle = math.sqrt(max(low, 1e-6) * high)
        low, high = (middle, high) if _mean_of_cut(middle, spread, longest) < mean_of_others else (low, middle)
    return LengthSource(
        prompt=prompt,
        mean=mean,
        longest=longest,
        median=high,
        spread=spread,
        runaways=runaways,
        source=(
            f"assumed: log-normal with a spread of {spread:g}, {runaways:.1%} never end, all cut at {longest:,}, "
            f"mean {mean:,.0f}, prompts of {prompt:,}"
        ),
    )


def _mean_of_cut(median: float, spread: float, longest: float) -> float:
    """Return the mean of ``min(X, longest)`` of a log-normal X."""
    if not spread:
        return min(median, longest)
    cut = math.log(longest / median) / spread
    below = median * math.exp(spread * spread / 2) * _normal(cut - spread)
    return below + longest * (1 - _normal(cut))


def _normal(value: float) -> float:
    """Return the cumulative normal distribution."""
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


def read_lengths(run: Path, most_steps: int = 20) -> LengthSource | None:
    """Return the lengths of a run's last recorded steps; None if it has recorded none.

    Raise `SamplesError` if its rollout log is damaged.
    """
    from tandem.observe.samples import SampleQuery, recorded_steps, select

    groups: list[GroupLengths] = []
    steps = recorded_steps(run)[-most_steps:]
    for step in steps:
        of_group: dict[int, list[tuple[int, int]]] = {}
        for sample in select(run, SampleQuery(step=step, limit=None, with_tokens=False)):
            scored = sample.scored
            of_group.setdefault(scored.group, []).append((scored.prompt_length, scored.response_length))
        groups += [_group_of(lengths) for lengths in of_group.values()]
    if not groups:
        return None
    num = sum(len(group.responses) for group in groups)
    longest = max(length for group in groups for length in group.responses)
    return LengthSource(
        recorded=tuple(groups),
        longest=longest,
        source=f"{num:,} samples of {len(steps)} steps of the run in {run}",
    )


def _group_of(lengths: Sequence[tuple[int, int]]) -> GroupLengths:
    return GroupLengths(lengths[0][0], tuple(max(1, response) for _, response in lengths))
