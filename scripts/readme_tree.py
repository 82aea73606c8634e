"""Print the captioned tree of the packages; with ``--write``, bring the README's up to date.

The caption of a file is the first line of its docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("libs/common", "services/coordinator", "services/trainer", "services/rollout", "services/refit")
_MARKED = re.compile(r"(<!-- tree -->\n).*?(<!-- /tree -->)", re.DOTALL)


def caption(path: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.splitlines()[0].rstrip(".") if docstring else ""


def tree() -> str:
    """Return the tree of every package as a fenced block."""
    lines = ["```"]
    for part in PARTS:
        package = ROOT / part / "src" / "tandem" / part.split("/")[1]
        lines.append(f"{package.relative_to(ROOT)}/   {caption(package / '__init__.py')}")
        for path in sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts) > 1, str(p))):
            name = str(path.relative_to(package))
            if name != "__init__.py":
                lines.append(f"    {name:<34} {caption(path)}")
    return "\n".join([*lines, "```"])


def with_tree(readme: str) -> str:
    """Return the README with a fresh tree."""
    return _MARKED.sub(lambda match: f"{match[1]}{tree()}\n{match[2]}", readme)


if __name__ == "__main__":
    page = ROOT / "README.md"
    if "--write" in sys.argv[1:]:
        page.write_text(with_tree(page.read_text()))
    else:
        print(tree())
