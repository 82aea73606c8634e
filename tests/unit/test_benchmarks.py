"""Every benchmark takes part in the smoke test of CI, or says what it needs that is not here."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.matrix_products import Product, products_of, seen
from benchmarks.results_files import merge

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "benchmarks").glob("test_*.py"))
MAY_BE_SKIPPED = {"test_vllm.py": "vLLM is not installed", "test_vllm_cuda.py": "vLLM is not installed"}
"""Files that are skipped whole where a package is missing, and what they say then."""


def collected(*options: str, files: Sequence[str] = ("benchmarks",), **environment: str) -> tuple[list[str], str]:
    """Return the ids of the benchmarks that would run, and all that pytest prints."""
    words = [
        str(Path(sys.executable).with_name("pytest")),
        *files,
        "--collect-only",
        "-q",
        "-rs",
        "-p",
        "no:randomly",
        *options,
    ]
    # Not what pytest tells its own processes: benchmarks warn where they are not alone.
    kept = {k: v for k, v in os.environ.items() if k != "TANDEM_BENCHMARK_SMOKE" and not k.startswith("PYTEST_")}
    done = subprocess.run(
        words, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^benchmarks/(\S+\.py::.*)$", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture(scope="module")
def smoked() -> tuple[list[str], str]:
    return collected(TANDEM_BENCHMARK_SMOKE="1")


def test_every_file_takes_part(smoked: tuple[list[str], str]) -> None:
    ids, printed = smoked
    assert len(FILES) >= 26
    there = {each.partition("::")[0] for each in ids}
    for name in FILES:
        if name not in there:
            assert name in MAY_BE_SKIPPED, f"{name} has no benchmark that is smoked"
            assert re.search(rf"{re.escape(name)}:\d+: {re.escape(MAY_BE_SKIPPED[name])}", printed), printed


def calls(function: ast.FunctionDef) -> set[str]:
    """Return the names of what a function calls."""
    return {
        node.func.id for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


@pytest.mark.parametrize("name", FILES)
def test_each_benchmark_has_rows_in_the_table_at_the_end(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / name).read_text())
    functions = {node.name: calls(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for benchmark in filter(lambda each: each.startswith("test_"), functions):
        reached, ahead = set[str](), [benchmark]
        while ahead:
            found = functions.get(ahead.pop(), set()) - reached
            reached |= found
            ahead += found
        assert reached & {"keep_ratios", "report"}, f"{benchmark} keeps no ratios"


def test_each_benchmark_runs_once(smoked: tuple[list[str], str]) -> None:
    names = [each.partition("[")[0] for each in smoked[0]]
    assert sorted(names) == sorted(set(names))


def test_both_halves_are_smoke_tests() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    for half, name in enumerate(("some-benchmarks", "other-benchmarks")):
        assert re.search(rf" -e \S*\b{name}\b", tox["testenv:benchmarks"]["commands"])
        assert f"pytest benchmarks --half {half}" in tox[f"testenv:{name}"]["commands"]
    assert "TANDEM_BENCHMARK_SMOKE = 1" in tox["testenv:some-benchmarks"]["set_env"]
    assert tox["testenv:other-benchmarks"]["set_env"] == "{[testenv:some-benchmarks]set_env}"


def test_two_halves_are_all(smoked: tuple[list[str], str]) -> None:
    names = ("test_curve.py", "test_planner.py", "test_scheduler.py")  # which import little
    files = [f"benchmarks/{name}" for name in names]
    halves = [collected("--half", half, files=files, TANDEM_BENCHMARK_SMOKE="1")[0] for half in "01"]
    assert sorted(halves[0] + halves[1]) == sorted(each for each in smoked[0] if each.startswith(names))
    assert all(halves)


def test_ci_runs_tox() -> None:
    assert re.search(r"^tox$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_what_is_long_is_skipped_and_says_what_runs_it() -> None:
    words = [sys.executable, "-m", "pytest", "benchmarks/test_diagnose.py", "-q", "-p", "no:randomly"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TANDEM_BENCHMARK_", "PYTEST_"))}
    done = subprocess.run(words, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"takes about 9 min: pytest benchmarks --long", done.stdout), done.stdout


def a_file(commit: str, *names: str) -> dict[str, Any]:
    """Return results as pytest-benchmark has them."""
    return {
        "machine_info": {"node": "2-core CPU machine", "cpu": {"brand_raw": "a processor"}},
        "commit_info": {"id": commit, "dirty": False},
        "benchmarks": [{"name": name, "extra_info": {"of": commit}} for name in names],
        "datetime": "2026-11-26T00:00:00+00:00",
        "version": "5",
    }


def test_results_keep_those_of_benchmarks_that_did_not_run(tmp_path: Path) -> None:
    path = tmp_path / "results" / "refit.json"
    merge(path, a_file("a", "test[short]", "test[long]"))
    merge(path, a_file("b", "test[short]", "test[new]"))
    found = json.loads(path.read_bytes())
    assert found["commit_info"]["id"] == "b"
    commits = {each["name"]: (each["measured"]["commit"], each["extra_info"]["of"]) for each in found["benchmarks"]}
    assert commits == {"test[short]": ("b", "b"), "test[long]": ("a", "a"), "test[new]": ("b", "b")}
    assert [each.name for each in path.parent.iterdir()] == ["refit.json"]


def test_the_bound_counts_the_products_of_a_model() -> None:
    """As torch counts them: all of linear layers; of attention, what queries may see, and nothing twice."""
    length, num_sequences = 15, 2
    settings = transformers.Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=64,
        attn_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    token_ids_BT = torch.zeros(num_sequences, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=token_ids_BT, labels=token_ids_BT, use_cache=False).loss.backward()
    counted = {str(operation): num for operation, num in counter.get_flop_counts()["Global"].items()}

    def ours(is_linear: bool) -> int:
        products = products_of(
            settings.to_dict(),
            rows=num_sequences * length,
            outputs=num_sequences * length,
            sequences=num_sequences,
            queries=length,
            keys=seen(length),
            trains=True,
        )
        return sum(
            product.num_operations * times for product, times in products.items() if (product.batch == 1) == is_linear
        )

    # Linear layers are `mm`. Attention is `bmm`, over all keys; beside it are the angles of positions, of one column.
    assert counted["aten.mm"] == ours(is_linear=True)
    assert counted["aten.bmm"] == pytest.approx(ours(is_linear=False) * length / seen(length), rel=0.01)
    assert Product(2, 3, 4, 5).num_operations == 240


@pytest.mark.parametrize("plugin", ["pytest_timeout", "pytest_benchmark"])
def test_a_missing_plugin_is_said_with_how_to_install_it(plugin: str) -> None:
    """As after the README's installation, which brings no plugins."""
    code = f"import sys; sys.modules[{plugin!r}] = None; import pytest"
    code += "; sys.exit(pytest.main(['benchmarks/test_scheduler.py']))"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    named, said = plugin.replace("_", "-"), done.stderr.strip().splitlines()
    assert said[-1].startswith(f"{named} is not installed: ")
    assert said[-1].endswith("pip install -e '.[dev]'")
    assert "Traceback" not in done.stderr
