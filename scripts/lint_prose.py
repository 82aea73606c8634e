"""Check the English of sources and documentation: CONTRIBUTING.md says what is looked for, and why.

It finds docstrings that open with a relative clause, words for people where a process is meant, sentences of more
than `MOST_WORDS` words, and turns of `DIALECT`. `ALLOWED` lists what stays, each with its reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 40
GENERATED = ("docs/configuration.md",)
"""Pages whose sentences are those of docstrings."""
_OPENS = re.compile(r"(Who|Whoever|Whom|Whose|Of|That|Which|So|As|What|To whom|By whom|With whom)\b")
_PEOPLE = re.compile(r"\b(who|whom|whoever|nobody|somebody|everybody|anybody|himself)\b", re.IGNORECASE)
"""Not "whose", which things have as well."""
_FENCED = re.compile(r"```.*?```|<!-- messages -->.*?<!-- /messages -->", re.DOTALL)
"""Code, and the tables that `scripts/protocol_page.py` writes."""
_QUOTED = re.compile(r"::\n\n( {4}.*\n|\n)+")
_DRAWN = re.compile(r"^(\s*\|.*|.*(──|▲|│|└).*)$", re.MULTILINE)
"""Tables and drawings."""
DIALECT: dict[str, tuple[re.Pattern[str], int]] = {
    "vision models": (re.compile(r"\bmodels? that sees?\b", re.IGNORECASE), 0),
    "continue": (re.compile(r"\b(?:go|goes|going|went|gone) on\b", re.IGNORECASE), 113),
    "next to, besides, while or compared with": (re.compile(r"\bbeside\b", re.IGNORECASE), 171),
    "is not a": (re.compile(r"(?<!there )\b(?:is|are|was|were) no (?!longer|better|faster)\w+", re.IGNORECASE), 57),
    "bitwise": (re.compile(r"\bto the bit\b", re.IGNORECASE), 14),
}
"""By what the field says instead: a turn of phrase, and how often sources may still have it. Pages have none."""
ALLOWED: dict[str, str] = {
    "The user who starts a run, and root": "users are people",
}
"""Pieces of text that are left alone, each with the reason."""


def findings(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file, a line each."""
    texts = _of_source(path) if path.suffix == ".py" else _of_page(path)
    for line, text, is_docstring in texts:
        where = f"{path.relative_to(ROOT)}:{line}"
        if any(allowed in " ".join(text.split()) for allowed in ALLOWED):
            continue
        if is_docstring and _OPENS.match(text.strip()):
            yield f"{where}: opens with a relative clause: {text.strip().splitlines()[0]}"
        for found in _PEOPLE.finditer(text):
            around = " ".join(text[max(0, found.start() - 40) : found.end() + 40].split())
            yield f"{where}: '{found.group()}' is for people: {around}"
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
            if len(sentence.split()) > MOST_WORDS:
                yield f"{where}: a sentence of {len(sentence.split())} words: {sentence[:80]}"


def turns_of_dialect(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each turn of `DIALECT` in a file: what the field says instead, and where it stands."""
    if path.suffix == ".py":
        texts = [(line, text) for line, text, _ in _of_source(path)]
    else:
        texts = [(1, _without_code(path.read_text()))]
    for line, text in texts:
        flat = text.replace("\n", " ")
        for instead, (pattern, _) in DIALECT.items():
            for match in pattern.finditer(flat):
                around = " ".join(flat[max(0, match.start() - 40) : match.end() + 40].split())
                where = f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, match.start())}"
                yield instead, f"{where}: '{match.group()}' is '{instead}': {around}"


def dialect_findings(sources: Sequence[Path], pages: Sequence[Path]) -> Iterator[str]:
    """Yield the dialect of pages, and that of sources where there is more of it than `DIALECT` allows."""
    for page in pages:
        yield from (line for _, line in turns_of_dialect(page))
    lines_by_phrase: dict[str, list[str]] = {instead: [] for instead in DIALECT}
    for path in sources:
        for instead, line in turns_of_dialect(path):
            lines_by_phrase[instead].append(line)
    for instead, lines in lines_by_phrase.items():
        most = DIALECT[instead][1]
        if len(lines) > most:
            yield from lines
            yield f"sources may have {most} of '{instead}', and have {len(lines)}"


def _without_code(page: str) -> str:
    """Return a page with its fenced blocks as empty lines."""
    return _FENCED.sub(lambda code: "\n" * code.group().count("\n"), page)


def _of_source(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield docstrings, texts that are raised, and comments, each with its line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, _DRAWN.sub("", _QUOTED.sub(":\n", text)), True
            case ast.Raise():
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                        yield part.lineno, part.value, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def _of_page(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the paragraphs of a Markdown page, without code and tables."""
    text = _without_code(path.read_text())
    text = re.sub(r"^(\s*\|.*|\[.*\]: .*|<!--.*-->)$", "", text, flags=re.MULTILINE)  # tables, where links lead, marks
    line = 1
    for part in re.split(r"(\n[ \t]*\n|\n(?=[ \t]*(?:[-*]|\d+\.) ))", text):
        yield line, re.sub(r"\]\([^)]*\)", "]", part), False
        line += part.count("\n")


def main() -> int:
    """Print every finding; return 1 if there is one."""
    sources = [path for part in ("libs", "services") for path in ROOT.glob(f"{part}/*/src/**/*.py")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    pages = [page for page in pages if str(page.relative_to(ROOT)) not in GENERATED]
    lines = [line for path in sorted([*sources, *pages]) for line in findings(path)]
    lines += dialect_findings(sorted(sources), pages)
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
