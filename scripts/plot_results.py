"""Collect runs into ``docs/results``: ``python scripts/plot_results.py FIGURE label=run-folder ...``.

Writes the JSON of each run and FIGURE.png of all of them; if that is ``grpo``, the README's table as well.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
from PIL import Image

from tandem.observe.report.report import draw_curves
from tandem.observe.report.side_by_side import RunSummary, summarise

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
_MARKED = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)


_HEADER = ("| run (2 cores of one CPU) | held-out accuracy before GRPO | after | steps |", "|---|---|---|---|")


def row(label: str, summary: RunSummary) -> str:
    """Return a run's line of the table."""
    points = summary.curves["val_accuracy"]
    return f"| {label} | {points[0][1]:.1%} | {points[-1][1]:.1%} | {summary.num_steps} |"


def shrink(path: Path) -> None:
    """Save a picture of few colours by their numbers: a third of the bytes."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(64).save(path, optimize=True)


def main(arguments: list[str]) -> None:
    """Write figure, JSON and table."""
    figure, *words = arguments
    runs = {label: summarise(Path(folder)) for label, _, folder in (word.partition("=") for word in words)}
    for label, summary in runs.items():
        name = re.sub(r"\W+", "_", label)
        (RESULTS / f"{name}.json").write_bytes(msgspec.json.encode(summary) + b"\n")
    draw_curves(runs, RESULTS / f"{figure}.png")
    shrink(RESULTS / f"{figure}.png")
    if figure != "grpo":
        return
    table = "\n".join([*_HEADER, *(row(label, summary) for label, summary in runs.items())])
    readme = ROOT / "README.md"
    readme.write_text(_MARKED.sub(lambda match: f"{match[1]}{table}\n{match[2]}", readme.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
