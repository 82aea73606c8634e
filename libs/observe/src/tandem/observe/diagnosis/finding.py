"""What a diagnosis finds."""

from __future__ import annotations

from typing import Literal

import msgspec

Certainty = Literal["certain", "likely", "possible"]
"""certain: the record says so itself. likely: the signs speak for it. possible: it may be so, and need not do harm."""
CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "possible")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run may have collapsed or stalled, and what in its record says so."""

    name: str
    """A few words; no two checks find the same."""
    what: str
    """What is so, in a sentence."""
    evidence: tuple[str, ...]
    """Steps, values and the thresholds that they are beyond, a line each."""
    look_at: str
    """The keys of the configuration to look at, or else the place."""
    certainty: Certainty
    since: int = 1
    """The first step that it is seen in, or whose weights it made."""
    explains: tuple[str, ...] = ()
    """Names of findings that follow from this one, where they are seen no earlier."""
    explained_by: str = ""
    """The name of the finding that this one follows from; the diagnosis fills it in."""
