"""Check how sources name things, so that grep finds them: CONTRIBUTING.md says what is looked for, and why.

It finds names that say nothing of what they name (`found`, `said`), functions that do not open with a verb, public
classes that share a name, and classes of one word. What a file had when the check began is listed in
``scripts/names_allowed.json``: a file may have fewer, and a new one has none. ``--write`` lists what is left.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).with_name("names_allowed.json")
GENERIC = frozenset(
    [
        "asked",
        "both",
        "came",
        "chosen",
        "done",
        "each",
        "found",
        "given",
        "held",
        "here",
        "how",
        "its",
        "kept",
        "known",
        "left",
        "made",
        "most",
        "one",
        "other",
        "others",
        "own",
        "rest",
        "said",
        "taken",
        "there",
        "told",
        "wanted",
        "what",
        "where",
        "whole",
        "why",
    ]
)
"""No noun of the field: each leaves the reader to ask "which?"."""
NO_VERBS = GENERIC | frozenset(["at", "beside", "by", "from", "in", "into", "meanwhile", "on", "to", "with", "without"])
"""What no function opens with."""
ONE_WORD = frozenset(
    [
        "Adapter",
        "Advantages",
        "Algorithm",
        "Checkpoint",
        "Coordinator",
        "Engine",
        "Episode",
        "Journal",
        "Layout",
        "Link",
        "Parameter",
        "Policy",
        "Prompt",
        "Refit",
        "Rollout",
        "Sample",
        "Scheduler",
        "Slice",
        "Supervisor",
        "Tokenizer",
        "Trainer",
        "Transport",
        "Turn",
        "Version",
        "Weights",
    ]
)
"""Classes of one word that every reader of the field knows."""
KINDS = {
    "generic": "says nothing of what it names",
    "function": "opens with no verb",
    "shared": "is the name of another public class too",
    "one word": "is one word, and not in the glossary",
}

Finding = tuple[str, int, str]
"""Kind, line and name."""


def bound_names(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.arg, str]]:
    """Yield each place where a name is bound, but for `each` in a comprehension."""
    in_comprehension = {
        id(name) for node in ast.walk(tree) if isinstance(node, ast.comprehension) for name in ast.walk(node.target)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id != "each" or id(node) not in in_comprehension:
                yield node, node.id
        elif isinstance(node, ast.arg):
            yield node, node.arg


def findings(tree: ast.Module, num_classes: Counter[str]) -> Iterator[Finding]:
    """Yield what a file names badly; `num_classes` counts the public classes of the house by name."""
    for place, name in bound_names(tree):
        if name.lstrip("_") in GENERIC:
            yield "generic", place.lineno, name
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
            continue
        if node.name.lstrip("_").split("_")[0] in NO_VERBS:
            yield "function", node.lineno, node.name
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
            if num_classes[statement.name] > 1:
                yield "shared", statement.lineno, statement.name
            if len(re.findall(r"[A-Z][a-z0-9]*", statement.name)) == 1 and statement.name not in ONE_WORD:
                yield "one word", statement.lineno, statement.name


def findings_by_file(root: Path) -> dict[str, list[Finding]]:
    """Return what every source under `root` names badly, by its path."""
    paths = [path for part in ("libs", "services") for path in sorted(root.glob(f"{part}/*/src/**/*.py"))]
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in paths}
    num_classes = Counter(
        statement.name
        for tree in trees.values()
        for statement in tree.body
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_")
    )
    return {path: list(findings(tree, num_classes)) for path, tree in trees.items()}


def counts_by_file(by_file: dict[str, list[Finding]]) -> dict[str, dict[str, int]]:
    """Count the findings of each kind in each file that has some."""
    return {
        path: dict(sorted(Counter(kind for kind, _, _ in file_findings).items()))
        for path, file_findings in by_file.items()
        if file_findings
    }


def totals(counts: dict[str, dict[str, int]]) -> Counter[str]:
    """Count the findings of each kind in the whole house."""
    return sum((Counter(of_file) for of_file in counts.values()), Counter())


def excess(by_file: dict[str, list[Finding]], allowed: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield a line for each finding in a file that has more of its kind than it may have."""
    for path, file_findings in by_file.items():
        counts = Counter(kind for kind, _, _ in file_findings)
        for kind, line, name in file_findings:
            ceiling = allowed.get(path, {}).get(kind, 0)
            if counts[kind] > ceiling:
                yield f"{path}:{line}: {name} {KINDS[kind]} ({counts[kind]} here, at most {ceiling})"


def write(counts: dict[str, dict[str, int]]) -> None:
    """List what each file has, a line each, as JSON."""
    lines = ",\n".join(f"{json.dumps(path)}: {json.dumps(counts[path])}" for path in sorted(counts))
    ALLOWED.write_text(f"{{\n{lines}\n}}\n")


def main() -> int:
    """Print every finding beyond what is allowed; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="list what is left; refused where the house has more")
    arguments = parser.parse_args()
    by_file = findings_by_file(ROOT)
    allowed: dict[str, dict[str, int]] = json.loads(ALLOWED.read_text())
    if not arguments.write:
        lines = list(excess(by_file, allowed))
        print("\n".join(lines), end="\n" if lines else "")
        return 1 if lines else 0
    counts = counts_by_file(by_file)
    before, now = totals(allowed), totals(counts)
    grown = [kind for kind in KINDS if now[kind] > before[kind]]
    for kind in grown:
        print(f"{now[kind]} names where there were {before[kind]}: each {KINDS[kind]}")
    if not grown:
        write(counts)
        print(", ".join(f"{kind}: {now[kind]} ({before[kind]} before)" for kind in KINDS))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
