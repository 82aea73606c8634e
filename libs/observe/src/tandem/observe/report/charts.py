"""SVG charts for a page that loads nothing: lines on two axes, and stacked layers.

A curve has at most two points in each of `_COLUMNS` columns, its minimum and maximum there. So a page is small however
long the run was, and no peak is lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 56, 12, 28
_COLUMNS = 300
_TICKS = 4
ROUNDING = 1e-4
"""Relative difference of values below which an axis does not separate them."""
_LARGE = 1e6
"""Value from which ticks are written as powers of ten."""
_FEW = 40
"""Number of points below which each is marked."""


class Line(NamedTuple):
    """A curve: its label, points and style."""

    label: str
    points: Points
    colour: int
    """Number of a colour in the page's palette."""
    dash: int
    is_right: bool = False
    """Whether it uses the right axis."""


def line_chart(lines: Sequence[Line]) -> str:
    """Return an SVG of lines, with axes where there are lines."""
    lines = [line._replace(points=[point for point in line.points if math.isfinite(point[1])]) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    steps = [step for line in lines for step, _ in line.points]
    across = _Axis.over(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    body = [*_steps(across)]
    for is_right in (False, True):
        own = [line for line in lines if line.is_right is is_right]
        values = [value for line in own for _, value in line.points]
        if not values:
            continue
        up = _Axis.over(min(values), max(values), _HEIGHT - _BOTTOM, _TOP)
        body += _values(up, is_right=is_right, has_grid=not is_right or len(own) == len(lines))
        for line in own:
            body += _drawn(line, across, up)
    return _svg(body)


def layer_chart(steps: Sequence[int], layers: Sequence[Sequence[float]]) -> str:
    """Return an SVG of stacked layers, the first at the bottom, each in the colour of its number."""
    if not steps or not layers:
        return ""
    chosen = _every_nth(len(steps))
    across = _Axis.over(steps[0], steps[-1], _LEFT, _WIDTH - _RIGHT)
    tops = [0.0] * len(chosen)
    edges = [tops]
    for layer in layers:
        tops = [low + max(layer[first:end]) for low, (first, end) in zip(tops, chosen, strict=True)]
        edges.append(tops)
    up = _Axis.over(0.0, max(edges[-1]), _HEIGHT - _BOTTOM, _TOP)
    xs = [across.at(steps[first]) for first, _ in chosen]
    body = [*_steps(across), *_values(up, is_right=False, has_grid=True)]
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        upper = [f"{x:.1f},{up.at(value):.1f}" for x, value in zip(xs, high, strict=True)]
        lower = [f"{x:.1f},{up.at(value):.1f}" for x, value in zip(xs, low, strict=True)]
        body.append(f'<polygon class="c{number} fill" points="{" ".join([*upper, *lower[::-1]])}"/>')
    return _svg(body)


def key(line: Line) -> str:
    """Return a short piece of a line, for a legend."""
    return (
        f'<svg class="key" viewBox="0 0 24 8" width="24" height="8" aria-hidden="true">'
        f'<path class="c{line.colour} d{line.dash}" d="M0 4H24"/></svg>'
    )


def layer_key(number: int) -> str:
    """Return a small piece of a layer, for a legend."""
    return (
        '<svg class="key" viewBox="0 0 24 8" width="24" height="8" aria-hidden="true">'
        f'<polygon class="c{number} fill" points="0,0 24,0 24,8 0,8"/></svg>'
    )


class _Axis(NamedTuple):
    """A linear scale: `low` is at `first`, `high` at `last`."""

    low: float
    high: float
    first: float
    last: float

    @staticmethod
    def over(low: float, high: float, first: float, last: float) -> _Axis:
        """Return an axis for these values; values equal up to rounding are in the middle, zeros at its end."""
        if low == high == 0:
            high = 1.0
        elif high - low < ROUNDING * max(abs(low), abs(high)):
            reach = max(abs(low), abs(high)) * ROUNDING
            low, high = low - reach, high + reach
        return _Axis(low, high, first, last)

    def at(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[tuple[float, str]]:
        """Return about `_TICKS` round values, with their texts."""
        rough = (self.high - self.low) / _TICKS
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
        first = math.ceil(self.low / step)
        places = [number * step for number in range(first, math.floor(self.high / step) + 1)]
        if max(abs(self.low), abs(self.high)) >= _LARGE:
            return [(place, f"{place:.3g}") for place in places]
        decimals = max(0, -math.floor(math.log10(step)))
        return [(place, f"{place:.{decimals}f}") for place in places]


def _steps(across: _Axis) -> Iterator[str]:
    for tick, _ in across.ticks():
        if tick == int(tick):
            yield f'<text x="{across.at(tick):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{int(tick)}</text>'


def _values(up: _Axis, *, is_right: bool, has_grid: bool) -> Iterator[str]:
    x, anchor = (_WIDTH - _RIGHT + 6, "start") if is_right else (_LEFT - 6, "end")
    for tick, text in up.ticks():
        y = up.at(tick)
        if has_grid:
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{x}" y="{y + 4:.1f}" text-anchor="{anchor}">{text}</text>'


def _drawn(line: Line, across: _Axis, up: _Axis) -> Iterator[str]:
    places = [(across.at(step), up.at(value)) for step, value in _thinned(line.points)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    last = f"{line.label}: {line.points[-1][1]:.4g} at step {line.points[-1][0]}"
    yield f'<path class="c{line.colour} d{line.dash}" d="M{path}"><title>{escape(last)}</title></path>'
    if len(places) < _FEW:
        for (x, y), (step, value) in zip(places, line.points, strict=True):
            told = f"{line.label}: {value:.4g} at step {step}"
            mark = f'<circle class="c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
            yield f"{mark}<title>{escape(told)}</title></circle>"


def _thinned(points: Points) -> Points:
    """Return the minimum and maximum of each column, in the order of steps."""
    if len(points) <= 2 * _COLUMNS:
        return points
    kept: list[tuple[int, float]] = []
    for first, end in _every_nth(len(points)):
        part = points[first:end]
        low, high = (of(range(len(part)), key=lambda i: part[i][1]) for of in (min, max))
        kept += [part[place] for place in sorted({low, high})]
    return kept


def _every_nth(count: int) -> list[tuple[int, int]]:
    """Divide `count` points into columns; return the start and end of each."""
    num_columns = min(count, _COLUMNS)
    edges = [round(column * count / num_columns) for column in range(num_columns + 1)]
    return [*itertools.pairwise(edges)]


def _svg(body: Sequence[str]) -> str:
    return f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(body)}</svg>'
