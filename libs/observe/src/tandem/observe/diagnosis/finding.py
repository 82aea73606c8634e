"""Findings of a diagnosis."""

from __future__ import annotations

from typing import Literal

import msgspec

Certainty = Literal["certain", "likely", "possible"]
"""certain: the record says so. likely: the signs point to it. possible: it may be so, and may be harmless."""
CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "possible")


class DiagnosisFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A possible cause of a collapse or stall, and its evidence in the record."""

    name: str
    """A few words, unique among the checks."""
    what: str
    """The finding in a sentence."""
    evidence: tuple[str, ...]
    """Steps, values and the thresholds that they exceed, one per line."""
    look_at: str
    """Configuration keys to look at, or another place."""
    certainty: Certainty
    since: int = 1
    """First step that shows it, or that made the weights concerned."""
    explains: tuple[str, ...] = ()
    """Names of findings that are consequences of this one, if they are not seen earlier."""
    explained_by: str = ""
    """Name of the finding that caused this one, filled in by the diagnosis."""
