"""Every type of causal language model in Transformers, made tiny, does what its row in docs/models.md says.

All of them are some minutes' work. With a day in ``TANDEM_TYPES_DAY``, as in CI, every third has its turn.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.harness.model_types.shrinking import (
    LEFT_OUT,
    MODEL_TYPES,
    UNUSED,
    list_lost_kinds,
    list_lost_modules,
    shrink,
)
from tests.harness.model_types.table import PAGE, format_table, measure_type, read_rows, write

NUM_TURNS = 3


def choose_types(day: str | None) -> tuple[str, ...]:
    """Return the types that have their turn on a day; all without one."""
    return MODEL_TYPES if not day else MODEL_TYPES[int(day) % NUM_TURNS :: NUM_TURNS]


def test_each_type_has_its_turn_on_one_of_three_days() -> None:
    days = [choose_types(str(day)) for day in range(20000, 20000 + NUM_TURNS)]
    assert sorted(model_type for types in days for model_type in types) == [*MODEL_TYPES]
    assert max(map(len, days)) - min(map(len, days)) <= 1
    assert choose_types(None) == MODEL_TYPES


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("model_type", choose_types(os.environ.get("TANDEM_TYPES_DAY")))
def test_a_type_does_what_its_row_says(model_type: str, tmp_path: Path) -> None:
    assert measure_type(model_type, tmp_path) == read_rows(PAGE.read_text())[model_type]


def test_the_page_has_every_type_of_this_release_of_transformers() -> None:
    page = PAGE.read_text()
    rows = read_rows(page)
    left_out = [model_type for types in LEFT_OUT.values() for model_type in types]
    assert len(left_out) == len({*left_out})
    assert {*rows} == {*MODEL_TYPES}
    assert {*rows, *left_out} == {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert f"Transformers {transformers.__version__}: " in page
    assert write(page, {}) == page, "python -m tests.harness.model_types.table --write"


def test_a_row_that_is_refused_says_why() -> None:
    for model_type, row in read_rows(PAGE.read_text()).items():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert {*cells[1:-2]} <= {"yes", "no"}, model_type
        assert cells[-2] in ("yes", "asked"), model_type
        measured = cells[1:-3]
        assert ("no" in measured) == bool(cells[-1]), model_type


def test_the_counts_are_those_of_the_rows() -> None:
    rows = read_rows(PAGE.read_text())
    (trains, engine) = (sum(row.split("|")[column].strip() == "yes" for row in rows.values()) for column in (2, 7))
    assert re.search(rf"trains {trains},.* embedded engine {engine},", format_table(rows))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tiny_model_has_all_kinds_of_layers(model_type: str) -> None:
    assert list_lost_kinds(model_type) == []
    assert list_lost_modules(model_type) == []


def test_a_lost_kind_of_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default configurations have no such layers, and the releases do."""
    monkeypatch.setattr("tests.harness.model_types.shrinking._OWN", {})
    assert list_lost_modules("lfm2") == ["Lfm2ShortConv"]
    assert list_lost_modules("zamba2") == ["Zamba2RotaryEmbedding"]
    assert "full_attention" in list_lost_kinds("jamba")


def test_what_is_said_to_be_unused_is() -> None:
    for model_type, names in UNUSED.items():
        kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(shrink(model_type))]
        module = __import__(kinds.__module__, fromlist=[""])
        assert all(hasattr(module, name) for name in names), model_type
