"""``coordinator refits RUN``: every refit of a run, from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.common.errors import RunFolderError
from tandem.observe.run_folder.journal import RefitRecord, read_journal

_COLUMNS = {
    "version": "version of the weights: number of training steps",
    "engines": "number of engines that received it",
    "MB": "megabytes moved; in place: engines read the trainers' memory, and nothing is moved",
    "copy ms": "time of the slowest process to move bytes",
    "predicted": "time predicted from the rates of cluster.links, in ms",
    "of bound": "least possible time over actual time of copying: 1.00 is the best",
    "transfer": "time until every engine held the version, in ms",
    "verify": "time from then until the version was verified, beside generation, in ms",
    "digest": "digest of the whole version, independent of sharding",
}
"""Columns and their meanings."""
_WIDTH = 100
"""Width of the table in characters; a narrower terminal wraps it, and loses nothing."""


def print_refits(folder: Path, console: Console) -> None:
    """Print the refits of the run in `folder`. Raises `RunFolderError` if it holds no run, or one without refits."""
    with read_journal(folder) as journal:
        records = journal.refits()
    if not records:
        raise RunFolderError(f"{folder} holds a run without refits")
    console.width = max(console.width, _WIDTH)
    console.print(refit_table(records))
    for column, meaning in _COLUMNS.items():
        console.print(f"  {column:<10} {meaning}", style="dim", highlight=False)
    for line in _links(records):
        console.print(line)
    for record in records:
        for engine, reason in record.quarantined.items():
            console.print(f"version {record.version}: {engine} was quarantined and refitted: {reason}", style="red")


def refit_table(records: Sequence[RefitRecord]) -> Table:
    """Return a table with one row per refit."""
    table = Table(box=None, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            str(record.version),
            str(len(record.engines)),
            "in place" if record.is_aliased else f"{sum(record.num_bytes.values()) / 1e6:.1f}",
            _milliseconds(record.seconds.get("copy")),
            _milliseconds(record.predicted_s),
            f"{record.share_of_bound:.2f}" if record.bound_s else "",
            _milliseconds(record.seconds.get("transfer")),
            _milliseconds(record.seconds.get("verify")),
            f"{record.digest:016x}" if record.digest else "not verified",
        )
    return table


def _links(records: Sequence[RefitRecord]) -> list[str]:
    """Return a line per link, with its total bytes."""
    totals: dict[str, int] = {}
    for record in records:
        for link, num_bytes in record.num_bytes.items():
            totals[link] = totals.get(link, 0) + num_bytes
    return [
        f"{link}  {f'{num_bytes / 1e6:,.1f} MB in all' if num_bytes else 'read in place'}"
        for link, num_bytes in sorted(totals.items())
    ]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
