"""The package ``tandem``: what it names is there, and importing it costs nothing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import tandem
from tandem.coordinator.api.training import train

SERVICES = ("coordinator", "rollout", "trainer", "refit")


def test_its_names_are_there_and_documented() -> None:
    assert tandem.train is train
    assert tandem.__version__ == importlib.metadata.version("tandem-rl")
    assert set(tandem.__all__) < set(dir(tandem))
    for name in tandem.__all__:
        assert getattr(tandem, name).__doc__, name
    assert typing.get_type_hints(tandem.load_run)["return"] is tandem.Run


def test_a_name_that_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="module 'tandem' has no attribute 'trian'"):
        tandem.trian  # noqa: B018 - that is the test


@pytest.mark.parametrize(
    "statement", ["import tandem", "import tandem.common", "import tandem.rollout.environments.processes.channel"]
)
def test_importing_it_imports_nothing_else(statement: str) -> None:
    probe = f"{statement}\nimport sys\nprint([m for m in sys.modules if m.startswith('tandem.coordinator')])"
    code = f"{probe}\nprint([m for m in ('torch', 'pyarrow', 'matplotlib', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n[]\n"


def test_the_parts_of_all_services_are_found_in_their_folders() -> None:
    folders = {Path(path).resolve() for path in tandem.__path__}
    assert len(folders) >= 1 + len(SERVICES) or "site-packages" in str(folders)
    for service in SERVICES:
        assert importlib.import_module(f"tandem.{service}").__file__


def test_it_is_typed() -> None:
    assert any((Path(path) / "py.typed").is_file() for path in tandem.__path__)
