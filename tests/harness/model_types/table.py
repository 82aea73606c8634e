"""The table of docs/models.md: ``python -m tests.harness.model_types.table --write [TYPE...]`` measures and writes it.

Without types all are measured, some minutes on two cores.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import transformers

from tests.harness.model_types import measuring
from tests.harness.model_types.measuring import DEFECT, REFUSED, YES
from tests.harness.model_types.shrinking import LEFT_OUT, MODEL_TYPES
from tests.harness.scripts import ROOT
from tests.harness.trainers import trainer_harness

PAGE = ROOT / "docs" / "models.md"
TITLES = {
    "padded": "trains",
    "packed": "packed rows",
    "shared": "shared prompts",
    "export": "saved and read",
    "lora": "LoRA",
    "engine": "embedded engine",
    "megatron": "Megatron-Core",
    "vllm": "vLLM",
}
"""Titles of columns, in their order."""
DECLARED = ("megatron", "vllm")
"""Columns of families that the product lists; what is not in a list has no reason of its own."""
DEADLINE_S = 540.0
_MARKED = re.compile(r"(<!-- types -->\n).*?(<!-- /types -->)", re.DOTALL)
_ROW = re.compile(r"^\| `([\w-]+)` \|.*$", re.MULTILINE)


def start_server() -> None:
    """Start the process that ranks are forked from, which has imported what measures them."""
    trainer_harness.CONTEXT.set_forkserver_preload(["pytest", trainer_harness.__name__, measuring.__name__])
    trainer_harness.start_server()


def measure_type(model_type: str, folder: Path) -> str:
    """Return the row of a type, measured in a process of its own. Raises `AssertionError` for a defect."""
    (outcomes,) = trainer_harness.run_ranks(1, measuring.measure, model_type, folder, deadline_s=DEADLINE_S)
    defects = {column: outcome for column, outcome in outcomes.items() if outcome.startswith(DEFECT)}
    assert not defects, f"{model_type}: {defects}"
    return format_row(model_type, outcomes)


def format_row(model_type: str, outcomes: Mapping[str, str]) -> str:
    """Return the row of a type, by what each column is."""
    otherwise = {"vllm": "asked"}
    cells = [YES if outcomes[column] == YES else otherwise.get(column, "no") for column in TITLES]
    columns: dict[str, list[str]] = defaultdict(list)
    for column, title in TITLES.items():
        if outcomes[column] != YES and column not in DECLARED:
            columns[outcomes[column].removeprefix(REFUSED)].append(title)
    reasons = "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in columns.items())
    return f"| {' | '.join([f'`{model_type}`', *cells, reasons.replace('|', '/')])} |"


def read_rows(page: str) -> dict[str, str]:
    """Return the rows of the table by type."""
    marked = _MARKED.search(page)
    assert marked is not None, f"{PAGE} has no marks for the table"
    return {match[1]: match[0] for match in _ROW.finditer(marked[0])}


def format_table(rows: Mapping[str, str]) -> str:
    """Return what stands between the marks."""
    heads = ["type", *TITLES.values(), "why not"]
    count = dict.fromkeys(TITLES, 0)
    for row in rows.values():
        for column, cell in zip(TITLES, row.split(" | ")[1:], strict=False):
            count[column] += cell == YES
    counts = ", ".join(f"{title} {count[column]}" for column, title in TITLES.items())
    lines = [
        f"Transformers {transformers.__version__}: {len(rows)} types. Of these: {counts}.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(rows[model_type] for model_type in sorted(rows)),
        "",
        "Transformers lists more types with causal language models, which are not in the table:",
        "",
        *(f"- {reason}: {', '.join(f'`{each}`' for each in types)}" for reason, types in LEFT_OUT.items()),
    ]
    return "\n".join(lines)


def write(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with these rows in place of its own of the same types."""
    known = {name: row for name, row in (read_rows(page) | dict(rows)).items() if name in MODEL_TYPES}
    return _MARKED.sub(lambda match: f"{match[1]}{format_table(known)}\n{match[2]}", page)


def main() -> None:
    """Measure types, print their rows, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", choices=[*MODEL_TYPES, []], help="types to measure")
    parser.add_argument("--write", action="store_true", help="write the rows to docs/models.md")
    arguments = parser.parse_args()
    start_server()
    for model_type in arguments.types or MODEL_TYPES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = measure_type(model_type, Path(folder))
            except AssertionError as error:
                print(error, flush=True)
                continue
        print(row, flush=True)
        if arguments.write:
            PAGE.write_text(write(PAGE.read_text(), {model_type: row}))


if __name__ == "__main__":
    main()
