"""Images attach: few files name them outside of their own, and a run of text imports none of these."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = re.compile(r"samples/images/|(?<!super)vision|/pictures\.py|/pictured\.py|/images\.py|/thumbnail")
"""Files of images alone."""
WORDS = {"image", "images", "vision", "pixel", "pixels", "picture", "pictures", "pictured", "seeing", "tower", "towers"}
NAMES = {"sees", "family_of"}
INCIDENTAL = {
    "samples/packaged_environments/programs/harbor_sandbox.py": "images of containers",
    "samples/packaged_environments/programs/containers.py": "the same",
    "samples/packaged_environments/programs/play_openenv.py": "the same",
    "config/checks/data.py": "the same",
    "config/schema/environments.py": "the same",
    "coordinator/clusters/kubernetes.py": "the same",
    "coordinator/observers/progress.py": "a picture of processes",
}
"""Files with these words for other things."""
MOST_FILES = 33
"""The files of 30 November 2026: wire formats, public keys, and for each interface what attaches its wrapper."""
TEXT_RUN = {
    "coordinator": "tandem.coordinator.loop.run, tandem.coordinator.algorithms",
    "rollout": "tandem.rollout.service, tandem.rollout.sample_recorder, tandem.rollout.engines.transformers",
    "agents": "tandem.rollout.agents.agents, tandem.rollout.external_requests, tandem.rollout.serving",
    "trainer": "tandem.trainer.service, tandem.trainer.backends.dtensor",
    "Megatron-Core": "tandem.trainer.backends.megatron.backend",
}
ALWAYS = {"tandem.config.checks.vision", "tandem.config.models.vision_families", "tandem.refit.adapters.vision"}
"""The rules of configurations, the table of families, and the catalogue of parameters are whole."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names in a file, and the texts that are one name, without comments and docstrings."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield f"{name} {other or ''}"
            case ast.ImportFrom(module=str(name)):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in docstrings and re.fullmatch(r"\w+", text):
                yield text


def is_of_images(name: str) -> bool:
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return bool(words & WORDS) or name in NAMES


def files_that_name_images() -> dict[str, list[str]]:
    found = {}
    for path in sorted([*ROOT.glob("libs/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")]):
        place = path.as_posix().split("/src/tandem/")[1]
        if not OWN.search(f"/{place}"):
            names = sorted({*filter(is_of_images, identifiers(ast.parse(path.read_text())))})
            if names:
                found[place] = names
    return found


def test_few_files_name_images_outside_of_their_own() -> None:
    found = files_that_name_images()
    assert {*INCIDENTAL} <= {*found}, "no longer: take it off the list"
    counted = [place for place in found if place not in INCIDENTAL]
    assert len(counted) <= MOST_FILES, f"attach it: {counted}"


@pytest.mark.parametrize("process", TEXT_RUN)
def test_a_run_of_text_imports_no_images(process: str) -> None:
    probe = f"import {TEXT_RUN[process]}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=300)
    loaded = {name for name in done.stdout.split() if name.startswith("tandem.")}
    assert len(loaded) > 50
    own = {name for name in loaded if OWN.search(f"/{name.replace('.', '/')}.py")}
    assert own <= ALWAYS
