"""What needs a package that is not installed says which extra brings it, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.common.distribution import install_command
from tests.harness.runs.running import coordinator, write_config


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_without_the_package_it_is_said_which_extra_is_missing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("hide").mkdir()
    Path(f"hide/{package}.py").write_text("raise ImportError('hidden by the test')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.abspath("hide"), os.environ.get("PYTHONPATH", "")]))
    ended = coordinator("up", write_config({"logger": {f"{package}_enabled": True}}))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    missing = f"the package {package} is not installed; {install_command(package)}"
    assert line == f"error: logger.{package}_enabled: {missing}"
    assert not Path("run").exists()
