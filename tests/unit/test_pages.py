"""The pages are true where that can be told without running anything: links lead on, and what is named is there."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from tandem.config import build_config
from tandem.coordinator.scheduler import scheduler as rules
from tandem.coordinator.scheduler.agenda import RuleMode
from tandem.rollout.engine import Engine
from tests.harness.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
OF_EVIDENCE = ("docs/evidence.md", "docs/hardware.md")
USERS_OWN = {"plans.py", "mine.py", "sums_v1.py", "make_data.py", "rewards.py", "hints.py"}
"""Files that pages have a user write."""


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> list[str]:
    """Return what links call the sections of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found]


def leads_somewhere(page: str, link: str) -> bool:
    name, _, section = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    return target.exists() and (not section or section in headings(target))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    references = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    links = [link for link in [*inline, *references.values()] if "://" not in link]
    assert [link for link in links if not leads_somewhere(page, link)] == []
    cited = set(re.findall(r"\[(`[^`\]]+`)\](?![(:\[])", prose(page)))
    assert cited == references.keys()


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    folders = ("libs", "services", "tests", "benchmarks", "scripts", "examples")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/.-]+\.py)`", prose(page))) - USERS_OWN
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)] == []


def test_the_page_of_engines_has_every_method_and_names_nothing_else() -> None:
    page = prose("docs/engines.md")
    rows = re.findall(r"^\| (`[^|]*) \| ", page.partition("## Weights")[0], re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    members = {name for name in {**vars(Engine), **Engine.__annotations__} if not name.startswith("_")}
    assert sorted(listed) == sorted(members)
    for path in set(re.findall(r"`(tandem\.[\w.]+)`", page)):
        assert pkgutil.resolve_name(path) is not None


def test_the_rules_of_the_architecture_are_the_schedulers() -> None:
    rows = re.findall(r"^\|.*\|$", rules.__doc__ or "", re.MULTILINE)
    assert rows[0] == "| rule | fires when | and then |"
    assert "\n".join(rows) in (ROOT / "docs" / "architecture.md").read_text()


def test_the_table_of_rules_has_them_in_the_order_in_which_they_are_asked() -> None:
    names = re.findall(r"^\| ([a-z ]+?) \|", rules.__doc__ or "", re.MULTILINE)
    asked = [rule.name for mode in (RuleMode.SETTING_UP, RuleMode.GOING_ON) for rule in rules.RULES[mode]]
    assert names == ["rule", *asked]


def test_names_in_the_code_of_pages_are_nouns() -> None:
    generic = load_script("lint_names").GENERIC
    blocks = {
        (page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    }
    assert len(blocks) > 20
    bound = {(page, name) for page, code in blocks for name in names_bound_in(code)}
    assert [(page, name) for page, name in sorted(bound) if name in generic | {"right", "nearer"}] == []


def names_bound_in(code: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(code)))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/") and page not in OF_EVIDENCE])
def test_which_test_shows_what_stands_on_the_page_of_evidence(page: str) -> None:
    assert re.findall(r"`[\w/]*\btest_\w+\.py`", prose(page)) == []


@pytest.mark.parametrize(("page", "most_lines"), [("README.md", 110), ("docs/architecture.md", 400)])
def test_a_page_to_read_has_no_more_lines(page: str, most_lines: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most_lines


def test_the_configuration_of_the_readme_is_one() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    config = build_config({"algorithm": "grpo", **yaml.safe_load(example)})
    assert config.policy.model_name == "Qwen/Qwen2.5-1.5B"
    assert config.env.keys() == {"mine"}
