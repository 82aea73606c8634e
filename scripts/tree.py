"""Print the captioned files of every package; with ``--write``, bring docs/files.md up to date.

The caption of a file is the first line of its docstring, and that of a folder the first line of its ``__init__.py``.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
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
    """Return a section for each package: its caption, then its files and folders with theirs, in a fenced block."""
    sections = []
    for part in PARTS:
        of_files = captions(part)
        caption_of_part = of_files.pop("__init__.py")
        lines = [f"{name.removesuffix('__init__.py'):<36} {text}" for name, text in of_files.items()]
        title = f"## {part}\n\n`{folder(part).relative_to(ROOT)}/`: {caption_of_part}."
        sections.append("\n".join([f"{title}\n\n```", *lines, "```"]))
    return "\n\n".join(sections)


def with_tree(page: str) -> str:
    """Return a page with a fresh tree."""
    return _MARKED.sub(lambda match: f"{match[1]}{tree()}\n{match[2]}", page)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_tree(PAGE.read_text()))
    else:
        print(tree())
