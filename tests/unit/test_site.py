"""The site of docs/ builds without a warning, has every page, needs no network, and knows a broken link."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=quiet)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", site)
    assert built.returncode == 0, built.stdout + built.stderr
    return site


def test_every_page_is_on_it(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages == {path.stem for path in site.glob("*.html")} - {"404"}
    listed = re.findall(r"(\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(pages)


def test_what_is_on_it_can_be_searched_for(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= {
        entry["location"].partition(".html")[0] for entry in entries
    }
    found = [entry["location"] for entry in entries if "max_trajectory_age_steps" in entry["text"]]
    assert "configuration.html" in {location.partition("#")[0] for location in found}
    page = (site / "quickstart.html").read_text()
    assert re.search(r"<input[^>]*data-md-component=\"?search-query", page)
    (worker,) = re.findall(r'"search":\s*"([^"]+)"', page)
    assert (site / worker).is_file()


def test_it_needs_no_network(site: Path) -> None:
    for page in site.glob("*.html"):
        fetched = re.findall(r"<(?:script|img|link)\b[^>]*(?:src|href)=\"?(https?://[^\">\s]+)", page.read_text())
        assert fetched == [], page


def test_the_reference_is_that_of_the_code(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference.html").read_text())
    for said in ("RecordedSample", "Rollout that generated it.", "read_step", "Raises SamplesError", "Score", "Turn"):
        assert said in text


@pytest.mark.parametrize("link", ["[gone](gone.md)", "[gone](../libs/gone.py)", "[gone](samples.md#gone)"])
def test_a_link_that_leads_nowhere_is_an_error(link: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "site_links.py", tmp_path / "scripts")
    (tmp_path / "docs" / "samples.md").write_text("# Samples\n")
    (tmp_path / "docs" / "index.md").write_text(f"# Index\n\n{link}\n")
    config = (ROOT / "mkdocs.yml").read_text()
    config = re.sub(r"^nav:.*?(?=^plugins:)", "", config, flags=re.DOTALL | re.MULTILINE)
    config = re.sub(r"^  - mkdocstrings:.*?(?=^hooks:)", "\n", config, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(config)
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert "gone" in built.stdout + built.stderr
