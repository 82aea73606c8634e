"""The example notebook runs from its first cell to its last, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

import tandem

NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "notebooks" / "train_from_python.ipynb"
CELL_S = 240


def test_the_notebook_trains_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kernel_spec(str(tmp_path / "jupyter" / "kernels" / "python3"))  # with this very interpreter
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert [f"step {number:2}" in printed for number in range(1, 21)] == [True] * 20
    assert any("tiny-run" in output.get("data", {}).get("text/html", "") for output in outputs)
    run = tandem.load_run(tmp_path / "tiny-run")
    assert run.state == "finished"
    rewards = list(run.metrics("reward").values())
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.2, "it learns"
