"""The tables of docs/migrating.md: which key here a field of another trainer's configuration becomes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
_CODE = re.compile(r"`([^`]+)`")


class Row(NamedTuple):
    """A row: fields of the peer, and keys of Tandem; either may be ``name: value``."""

    fields: tuple[str, ...]
    keys: tuple[str, ...]
    """Empty if there is no such key."""


def rows_of(title: str) -> list[Row]:
    """Return the rows of the table below a heading of the third level."""
    _, _, rest = PAGE.read_text().partition(f"\n### {title}\n")
    assert rest, f"docs/migrating.md has no section {title!r}"
    lines = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("|")]
    rows = []
    for line in lines[2:]:
        fields, keys, _ = line.strip("|").split("|", 2)
        assert _CODE.search(keys) or keys.strip() == "–", f"neither a key nor a dash: {line}"
        rows.append(Row(tuple(_CODE.findall(fields)), tuple(_CODE.findall(keys))))
    return rows


def named(title: str) -> set[str]:
    """Return the peer's fields in a table, without values."""
    return {field.partition(":")[0] for row in rows_of(title) for field in row.fields}


TRL = {
    "GRPOConfig": "TRL 1.16: `GRPOConfig`",
    "SFTConfig": "TRL 1.16: `SFTConfig`",
    "DPOConfig": "TRL 1.16: `DPOConfig`",
    "TrainingArguments": "Transformers 5: the arguments of all of them",
}
VERL = {"actor": "verl 0.9: `actor_rollout_ref.actor`", "algorithm": "verl 0.9: `algorithm`"}
