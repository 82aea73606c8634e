"""No module needs itself: imports inside functions count, too; those for type checkers alone never run."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import grimp
import pytest

import tandem


def cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return the groups of modules that import each other."""
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while True:  # what imports nothing that is left, or is imported by nothing that is left, is in no cycle
        imported = set().union(*left.values())
        ends = {module for module, imports in left.items() if not imports or module not in imported}
        if not ends:
            break
        left = {module: imports - ends for module, imports in left.items() if module not in ends}
    groups: list[list[str]] = []
    while left:
        start = min(left)
        group = {start} | {other for other in left if _reaches(left, start, other) and _reaches(left, other, start)}
        if len(group) > 1:
            groups.append(sorted(group))
        left = {module: imports - group for module, imports in left.items() if module not in group}
    return groups


def _reaches(imports: dict[str, set[str]], start: str, target: str) -> bool:
    seen, edge = {start}, {start}
    while edge:
        edge = set().union(*(imports[module] for module in edge)) - seen
        if target in edge:
            return True
        seen |= edge
    return False


def test_no_module_imports_itself_by_way_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("tandem")
    assert isinstance(spec, ModuleSpec)
    # grimp looks where the package would be found, and not at the folders that its __init__ adds.
    monkeypatch.setattr(spec, "submodule_search_locations", list(tandem.__path__))
    graph = grimp.build_graph("tandem", cache_dir=None, exclude_type_checking_imports=True)
    libraries = ("common", "config", "samples", "observe", "launch", "serving")
    services = ("coordinator", "refit", "rollout", "trainer")
    assert all(f"tandem.{part}" in graph.modules for part in (*libraries, *services))
    assert cycles(graph) == []


@pytest.mark.parametrize("edges", [["ab", "bc", "ca", "cd", "ed"], ["ab", "ba", "bc"]])
def test_a_cycle_is_found(edges: list[str]) -> None:
    graph = grimp.ImportGraph()
    for importer, imported in edges:
        graph.add_import(importer=importer, imported=imported)
    (found,) = cycles(graph)
    assert found == (["a", "b", "c"] if len(edges) > 3 else ["a", "b"])
