"""Keys of Tandem in the tables of docs/migrating.md are keys that there are, with values that they take."""

from __future__ import annotations

import pytest

from tandem.config.conform import all_keys, choices_of_keys, config_type
from tests.harness.migrating import TRL, VERL, rows_of

KEYS = set(all_keys(config_type()))
CHOICES = dict(choices_of_keys())


@pytest.mark.parametrize("title", [*TRL.values(), *VERL.values()])
def test_every_key_is_one(title: str) -> None:
    keys = [key for row in rows_of(title) for key in row.keys]
    assert len(keys) > 5
    assert [key for key in keys if key.partition(":")[0] not in KEYS] == []
    for name, _, value in (key.partition(": ") for key in keys):
        if value and CHOICES.get(name):
            assert value in CHOICES[name], f"{name}: {value}"


@pytest.mark.parametrize("title", [*TRL.values(), *VERL.values()])
def test_no_field_has_two_rows(title: str) -> None:
    fields = [field for row in rows_of(title) for field in row.fields]
    assert len(fields) == len(set(fields))
