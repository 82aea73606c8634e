"""Find where the keys of the configuration are read, from the syntax trees of the sources.

An expression has the sections that its annotations, its assignments and the schema itself say, as far as they can be
followed without running anything. Reading a field of such a section is a read of its key. What is read in another way
(by a name in a variable, or as a whole section) is not found.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tandem.config import schema
from tandem.config.schema.base import ConfigSection

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "libs/config/src/tandem/config"
_NO_EFFECT = ("checks", "installed", "names")
"""Folders of the configuration that only check, or name."""
_FRONT_END = frozenset(
    {
        *("conform", "data_sets", "derive", "describe", "dump", "foreign", "hidden", "layers"),
        *("load", "megatron", "moot_keys", "nemo_eval", "notice_rules", "problem", "shapes"),
        "unsupported",
    }
)
"""Modules of the configuration that make it, and explain it."""
_ITEMS = ("values", "items", "get", "pop")

Sections = frozenset[type[ConfigSection]]
NONE: Sections = frozenset()


class Read(NamedTuple):
    """A place that reads a field, or another attribute, of a section."""

    section: type[ConfigSection]
    name: str
    path: Path
    reader: tuple[str, str] | None
    """Class of the schema and its attribute, where the schema itself reads; None elsewhere."""


@cache
def sections() -> dict[str, type[ConfigSection]]:
    """Return all classes of the schema, by name."""
    found: dict[str, type[ConfigSection]] = {}
    waiting = list(ConfigSection.__subclasses__())
    while waiting:
        each = waiting.pop()
        found[each.__name__] = each
        waiting += each.__subclasses__()
    assert schema.Config.__name__ in found
    return found


@cache
def _annotations(section: type) -> dict[str, Any]:
    """Return the annotations of a class's fields and properties, as syntax trees."""
    found: dict[str, ast.expr] = {}
    for each in reversed(section.__mro__):
        if issubclass(each, ConfigSection) and each is not ConfigSection:
            for node in _class_body(each):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found[node.target.id] = node.annotation
                elif isinstance(node, ast.FunctionDef) and node.returns is not None:
                    found[node.name] = node.returns
    return found


@cache
def _class_body(section: type) -> list[ast.stmt]:
    tree = _tree(Path(inspect.getfile(section)))
    (node,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == section.__name__)
    return node.body


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def sources() -> tuple[Path, ...]:
    """Return all source files."""
    return tuple(path for folder in ("libs", "services") for path in sorted((ROOT / folder).glob("*/src/**/*.py")))


def has_effect(path: Path) -> bool:
    """Tell whether reads in a file have an effect on a run, beside those of the schema."""
    if CONFIG not in path.parents:
        return True
    return path.parent.name not in _NO_EFFECT and path.stem not in _FRONT_END


@cache
def _imported(path: Path) -> dict[str, type[ConfigSection]]:
    """Return the sections that a file knows, by the names that it has for them."""
    if CONFIG / "schema" in path.parents:
        return sections()
    found: dict[str, type[ConfigSection]] = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem.config"):
            for alias in node.names:
                if alias.name in sections():
                    found[alias.asname or alias.name] = sections()[alias.name]
                elif alias.name == "schema":
                    found |= {f"{alias.asname or alias.name}.{name}": each for name, each in sections().items()}
    return found


def _named_in(annotation: ast.AST | None, names: dict[str, type[ConfigSection]]) -> Sections:
    """Return the sections that an annotation names, whatever they are wrapped in."""
    if annotation is None:
        return NONE
    nodes = [node for node in ast.walk(annotation) if isinstance(node, ast.Name | ast.Attribute)]
    return frozenset(names[text] for node in nodes if (text := ast.unparse(node)) in names)


class _Known(NamedTuple):
    """What all files together say of names."""

    attributes: dict[str, Sections]
    """Sections of attributes of classes outside the schema."""
    functions: dict[str, Sections]
    """Sections that functions return."""


class _Scope(ast.NodeVisitor):
    """The reads of one function or module, in the order of its statements."""

    def __init__(self, known: _Known, names: dict[str, Sections], path: Path, reader: tuple[str, str] | None) -> None:
        self.known, self.names, self.path, self.reader = known, dict(names), path, reader
        self.imported = _imported(path)
        self.reads: list[Read] = []
        self.attributes: dict[str, Sections] = {}

    def of(self, node: ast.AST | None) -> Sections:
        """Return the sections that an expression may have."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name, NONE)
            case ast.Attribute(value=value, attr=name):
                return self._attribute(self.of(value), name)
            case ast.Call():
                return self._called(node)
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.Await(value=value):
                return self.of(value)
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
                return self.of(value)
            case ast.IfExp(body=one, orelse=other):
                return self.of(one) | self.of(other)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
                return frozenset().union(*map(self.of, values))
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
                return self.of(element)
            case ast.DictComp(value=value):
                return self.of(value)
            case _:
                return NONE

    def _called(self, node: ast.Call) -> Sections:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return self._attribute(self.of(value), name)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="structs"), attr="replace"), args=[value, *_]):
                return self.of(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _ITEMS and self.of(value):
                return self.of(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return self._attribute(self.of(value), name) or self.known.functions.get(name, NONE)
            case ast.Call(func=ast.Name(id=name)) if name in self.imported:
                return frozenset({self.imported[name]})
            case ast.Call(func=ast.Name(id=name), args=arguments):
                inner = frozenset().union(*map(self.of, arguments)) if name in _PASSING else NONE
                return inner or self.known.functions.get(name, NONE)
            case _:
                return NONE

    def _attribute(self, owners: Sections, name: str) -> Sections:
        if not owners:
            return self.known.attributes.get(name, NONE)
        return frozenset().union(*(_named_in(_annotations(owner).get(name), sections()) for owner in owners))

    def _bind(self, target: ast.AST, value: ast.AST | None, sections: Sections | None = None) -> None:
        found = self.of(value) if sections is None else sections
        match target:
            case ast.Name(id=name) if found:
                self.names[name] = found
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if found:
                self.attributes[name] = self.attributes.get(name, NONE) | found
            case ast.Tuple(elts=targets):
                values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(targets) else None
                for index, each in enumerate(targets):
                    self._bind(each, values[index] if values else None, None if values else found)
            case _:
                pass

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read(self.of(node.value), node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                self._read(self.of(value), name)
            case _:
                pass
        self.generic_visit(node)

    def _read(self, owners: Sections, name: str) -> None:
        self.reads += [Read(owner, name, self.path, self.reader) for owner in owners]

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, node.value, _named_in(node.annotation, self.imported) or None)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, None, self.of(node.iter))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, None, self.of(node.iter))
        self.generic_visit(node)

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp) -> None:
        before = dict(self.names)
        for each in node.generators:
            self.visit(each)
        for child in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(child)
        self.names = before

    visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = _comprehension

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inner(node.args, [node.body], self.reader)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inner(node.args, node.body, self.reader)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        own = sections().get(node.name) if CONFIG / "schema" in self.path.parents else None
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and own is None:
                self.attributes[each.target.id] = self.attributes.get(each.target.id, NONE) | _named_in(
                    each.annotation, self.imported
                )
            if isinstance(each, ast.FunctionDef) and own is not None:
                self._inner(each.args, each.body, (node.name, each.name), {"self": frozenset({own})})
            elif not isinstance(each, ast.AnnAssign):
                self.visit(each)

    def _inner(
        self,
        arguments: ast.arguments,
        body: list[Any],
        reader: tuple[str, str] | None,
        given: dict[str, Sections] | None = None,
    ) -> None:
        names = {**self.names, **(given or {})}
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if (given is None or each.arg not in given) and each.arg != "self":
                usual = frozenset({sections()["Config"]}) if each.arg == "config" and each.annotation is None else NONE
                names[each.arg] = _named_in(each.annotation, self.imported) or usual
        inner = _Scope(self.known, names, self.path, reader)
        for statement in body:
            inner.visit(statement)
        self.reads += inner.reads
        for name, found in inner.attributes.items():
            self.attributes[name] = self.attributes.get(name, NONE) | found


_PASSING = ("zip", "enumerate", "list", "tuple", "sorted", "reversed", "next", "iter", "max", "min", "filter", "cast")
"""Functions that return what they are given, or parts of it."""


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a module or class, and the methods of its classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)


def _known_everywhere() -> _Known:
    """Return what all files say: sections that functions return, and those of attributes that constructors set."""
    functions: dict[str, Sections] = {}
    for path in sources():
        for node in _functions(_tree(path).body):
            if named := _named_in(node.returns, _imported(path)):
                functions[node.name] = functions.get(node.name, NONE) | named
    known = _Known({}, functions)
    for path in sources():
        scope = _Scope(known, {}, path, None)
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef):
                body = [each for each in node.body if isinstance(each, ast.AnnAssign) or _is_constructor(each)]
                scope.visit_ClassDef(ast.ClassDef(node.name, node.bases, [], body, []))
        for name, found in scope.attributes.items():
            known.attributes[name] = known.attributes.get(name, NONE) | found
    return known


def _is_constructor(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


@cache
def all_reads() -> tuple[Read, ...]:
    """Return all reads of sections in the sources."""
    known = _known_everywhere()
    reads: list[Read] = []
    for path in sources():
        scope = _Scope(known, {}, path, None)
        for statement in _tree(path).body:
            scope.visit(statement)
        reads += scope.reads
    return tuple(reads)


def readers_of() -> dict[tuple[str, str], set[str]]:
    """Return the files with an effect that read each attribute of each section, itself or through the schema."""
    by_attribute: dict[tuple[type[ConfigSection], str], set[str]] = {}
    through: dict[tuple[str, str], set[tuple[type[ConfigSection], str]]] = {}
    for read in all_reads():
        if read.reader is not None:
            through.setdefault(read.reader, set()).add((read.section, read.name))
        elif has_effect(read.path):
            by_attribute.setdefault((read.section, read.name), set()).add(str(read.path.relative_to(ROOT)))
    waiting = list(by_attribute)
    while waiting:
        section, name = waiting.pop()
        files = by_attribute[section, name]
        for each in _family(section):
            for inner in through.get((each.__name__, name), ()):
                before = by_attribute.setdefault(inner, set())
                if not files <= before:
                    before |= files
                    waiting.append(inner)
    return {(section.__name__, name): files for (section, name), files in by_attribute.items()}


def _family(section: type[ConfigSection]) -> Iterator[type[ConfigSection]]:
    """Yield a section, those that it inherits from, and those that inherit from it."""
    yield from (each for each in section.__mro__ if issubclass(each, ConfigSection))
    yield from (each for each in sections().values() if each is not section and issubclass(each, section))


def fields_of(section: type[ConfigSection]) -> Iterator[tuple[str, str]]:
    """Yield each field of a section, with the name of its key."""
    yield from ((field.name, field.encode_name) for field in msgspec.structs.fields(section))
