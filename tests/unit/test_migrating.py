"""Keys of Tandem in the tables of docs/migrating.md exist, and errors about unknown keys name the same ones."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tandem.config.conform import config_type, list_choices_of_keys, list_keys
from tandem.config.peer_names import TRL as NAMES_OF_TRL
from tandem.config.peer_names import VERL as NAMES_OF_VERL
from tests.harness.migrating import TRL, VERL, rows_of

KEYS = set(list_keys(config_type()))
CHOICES = dict(list_choices_of_keys())


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


def keys_of(titles: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the keys here of each field of these tables: names of titles are prefixes of the fields."""
    keys: dict[str, set[str]] = {}
    for prefix, title in titles.items():
        for row in rows_of(title):
            for field in row.fields:
                own = keys.setdefault(f"{prefix}{field.partition(':')[0]}", set())
                own.update(key.partition(":")[0] for key in row.keys)
    return keys


def named_in(text: str) -> set[str]:
    """Return the keys, or entries of free mappings, that a hint names."""
    words = {word.rstrip(".") for word in re.findall(r"[\w.]+", text)}
    return {word for word in words if "." in word and (word in KEYS or word.rpartition(".")[0] in KEYS)}


def is_alike(one: set[str], other: set[str]) -> bool:
    """Tell whether both name a key in common, or a key and its section, or neither names any."""
    pairs = [(a, b) for a in one for b in other]
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a, b in pairs) or not (one or other)


def test_errors_about_unknown_keys_say_the_same() -> None:
    of_trl = {f"{number}:": title for number, title in enumerate(TRL.values())}
    pages: dict[str, set[str]] = {}
    for field, keys in keys_of(of_trl).items():
        pages.setdefault(field.partition(":")[2], set()).update(keys)
    of_verl = keys_of({"actor_rollout_ref.actor.": VERL["actor"], "algorithm.": VERL["algorithm"]})
    for page, names in ((pages, NAMES_OF_TRL), (of_verl, NAMES_OF_VERL)):
        shared = {name: text for name, text in names.items() if name in page and name != "algorithm.adv_estimator"}
        assert len(shared) > 40
        differing = {
            name: (text, page[name]) for name, text in shared.items() if not is_alike(named_in(text), page[name])
        }
        assert differing == {}
