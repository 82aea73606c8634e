"""The distribution is ``tandem-rl``: on the index, ``tandem`` is another project's, and nothing here recommends it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tandem.common import distribution
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.coordinator import cli

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_OURS = re.compile(r"(?<![\w./-])tandem(\[|==)|pip3? install (-\S+ )*['\"]?tandem(?![\w-])")
"""A requirement of the distribution `tandem`."""
LOOKED_AT = ("*.py", "*.md", "*.toml", "*.yml", "*.yaml", "*.sh", "*.ipynb", "*.ini", "*.Dockerfile", ".ci/run")


@pytest.mark.parametrize(
    ("text", "is_other"),
    [
        ("pip install 'tandem[vllm]'", True),
        ("pip install -U tandem", True),
        ("tandem==0.4.3", True),
        ("pip install 'tandem-rl[vllm]'", False),
        ("pip install -e '/opt/tandem[vllm]'", False),
    ],
)
def test_a_recommendation_of_the_other_project_is_recognised(text: str, is_other: bool) -> None:
    assert bool(NOT_OURS.search(text)) is is_other


def test_nothing_recommends_the_other_project() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *LOOKED_AT],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git repository")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and Path(name).name != Path(__file__).name]
    assert len(files) > 500
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.is_file() and path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NOT_OURS.search(line)
    ]
    assert found == []


def test_the_extras_that_messages_name_are_there() -> None:
    named = {kind.extra for kind in ENGINE_KINDS.values() if kind.extra}
    for part in ("libs", "services"):
        for path in (ROOT / part).rglob("*.py"):
            named |= set(re.findall(r"install_command\(['\"](\w+)['\"]\)", path.read_text(encoding="utf-8")))
    assert {"vllm", "wandb"} <= named <= set(PROJECT["optional-dependencies"])


def test_in_a_clone_the_clone_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert distribution.install_command("vllm") == "pip install -e '.[vllm]'"
    monkeypatch.chdir(tmp_path)
    assert distribution.install_command("vllm") == f"pip install -e '{ROOT}[vllm]'"


def test_away_from_a_clone_the_index_has_it(tmp_path: Path) -> None:
    """The module by itself, as a wheel lays it out; nothing is installed under its name."""
    folder = tmp_path / "lib" / "python3" / "site-packages" / "tandem" / "common"
    folder.mkdir(parents=True)
    shutil.copy(distribution.__file__, folder)
    code = "import distribution as d; d.NAME = 'tandem-rl-not-installed'; print(d.version(), d.list_requirements())"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; d.NAME = 'tandem-rl'; print(d.install_command('vllm'))"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "unknown []\npip install 'tandem-rl[vllm]'\n", done.stderr


def test_a_clone_that_is_not_installed_knows_its_version_and_requirements() -> None:
    """Only the source folders are on the path: no environment's packages, and so no metadata."""
    sources = os.pathsep.join(str(path) for part in ("libs", "services") for path in (ROOT / part).glob("*/src"))
    code = "import tandem; from tandem.common.distribution import list_requirements; print(tandem.__version__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}; print(*list_requirements(), sep='\\n')"],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    version, *required = done.stdout.splitlines()
    assert version == PROJECT["version"]
    assert {"torch", "vllm"} <= {Requirement(line).name for line in required}


def test_the_command_says_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tandem {distribution.version()}\n"
