"""Separate plans for frozen and changing tensors: frozen ones move to an engine once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from tandem.refit.columns import Ints
from tandem.refit.layout import Layout, PieceColumns


class FrozenPart(msgspec.Struct, frozen=True, eq=False):
    """Either the frozen or the changing tensors of all layouts; other pieces are left out."""

    is_frozen: bool
    sources: Mapping[str, Layout]
    destinations: Mapping[str, Layout]
    rows: Mapping[str, Ints] | None = None
    """Row of each piece in the whole layout, by process. None if the part is the whole layout."""

    @property
    def sides(self) -> tuple[Mapping[str, Layout], Mapping[str, Layout]]:
        """Sources and destinations."""
        return self.sources, self.destinations


def parts(sources: Mapping[str, Layout], destinations: Mapping[str, Layout]) -> list[FrozenPart]:
    """Return the frozen and the changing part, as marked by trainers; a single part if nothing is frozen."""
    frozen = {
        tensor.name
        for tensors in {id(layout.tensors): layout.tensors for layout in sources.values()}.values()
        for tensor in tensors
        if tensor.is_frozen
    }
    if not frozen:
        return [FrozenPart(False, sources, destinations)]
    frozen_parts = []
    for is_frozen in (True, False):
        part_layouts, rows = _select_pieces({**sources, **destinations}, frozen, is_frozen=is_frozen)
        part_sources, part_destinations = (
            {member: part_layouts[member] for member in side} for side in (sources, destinations)
        )
        frozen_parts.append(FrozenPart(is_frozen, part_sources, part_destinations, rows))
    return frozen_parts


def _select_pieces(
    layouts: Mapping[str, Layout], frozen: set[str], *, is_frozen: bool
) -> tuple[dict[str, Layout], dict[str, Ints]]:
    """Return layouts with the pieces of one part, and their rows; layouts that share columns go on sharing them."""
    cache: dict[tuple[int, int], tuple[PieceColumns, Ints]] = {}
    part_layouts, rows = {}, {}
    for member, layout in layouts.items():
        key = id(layout.tensors), id(layout.pieces)
        if key not in cache:
            is_kept_T = np.array([(tensor.name in frozen) == is_frozen for tensor in layout.tensors], np.bool_)
            rows_P = np.flatnonzero(is_kept_T[layout.pieces.tensor_P])
            cache[key] = layout.pieces.rows(rows_P), rows_P
        pieces, rows[member] = cache[key]
        part_layouts[member] = msgspec.structs.replace(layout, pieces=pieces)
    return part_layouts, rows
