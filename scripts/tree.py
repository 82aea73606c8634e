"""Print the captioned tree of the packages; with ``--write``, bring the one of docs/architecture.md up to date.

The caption of a file is the first line of its docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PARTS = (
    *(f"libs/{name}" for name in ("common", "config", "samples", "observe", "launch", "serving")),
    *(f"services/{name}" for name in ("coordinator", "trainer", "rollout", "refit")),
)
_MARKED = re.compile(r"(<!-- tree -->\n).*?(<!-- /tree -->)", re.DOTALL)


def caption(path: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.splitlines()[0].rstrip(".") if docstring else ""


def captions(part: str) -> dict[str, str]:
    """Return the caption of each file of a package, by its path there: the package's own, modules, then folders."""
    package = folder(part)
    paths = sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts) > 1, str(p)))
    return {str(path.relative_to(package)): caption(path) for path in paths}


def folder(part: str) -> Path:
    """Return where the package of a part lies."""
    return ROOT / part / "src" / "tandem" / part.split("/")[1]


def tree() -> str:
    """Return the tree of every package as a fenced block."""
    lines = ["```"]
    for part in PARTS:
        of_files = captions(part)
        lines.append(f"{folder(part).relative_to(ROOT)}/   {of_files.pop('__init__.py')}")
        lines += [f"    {name:<34} {text}" for name, text in of_files.items()]
    return "\n".join([*lines, "```"])


def with_tree(page: str) -> str:
    """Return a page with a fresh tree."""
    return _MARKED.sub(lambda match: f"{match[1]}{tree()}\n{match[2]}", page)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_tree(PAGE.read_text()))
    else:
        print(tree())
