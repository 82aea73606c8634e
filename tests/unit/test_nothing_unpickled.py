"""What is in no line of Tandem's: a call that unpickles, or that lets a model's folder run code of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((*ROOT.glob("libs/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")))
FORBIDDEN_MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle")
FORBIDDEN_CALLS = ("recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object")
"""Of zmq and torch.distributed: they pickle."""
OF_A_FOLDER = (
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForTokenClassification",
    "AutoTokenizer",
    "AutoProcessor",
    "AutoModel",
)
"""Classes of Transformers that would run code from a model's folder if they are let to."""


def test_nothing_is_unpickled_and_no_model_runs_code() -> None:
    assert len(SOURCES) > 200
    found = {str(path.relative_to(ROOT)): [*_offences(ast.parse(path.read_text()))] for path in SOURCES}
    assert {name: offences for name, offences in found.items() if offences} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as json",
        "np.load('a.npz', allow_pickle=True)",
        "numpy.load(file)",
        "torch.load('a.pt')",
        "torch.load('a.pt', weights_only=False)",
        "socket.recv_pyobj()",
        "transformers.AutoConfig.from_pretrained(folder)",
        "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)",
        "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)",
        "transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=anything)",
        "datasets.load_dataset(name, trust_remote_code=True)",
    ],
)
def test_each_of_these_is_found(line: str) -> None:
    assert [*_offences(ast.parse(line))]


def _offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=module):
                if (module or "").split(".")[0] in FORBIDDEN_MODULES:
                    yield str(module)
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                if _is_offence(ast.unparse(owner).split(".")[-1], name, node):
                    yield ast.unparse(node)
            case _:
                pass


def _is_offence(owner: str, name: str, call: ast.Call) -> bool:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if given.get("allow_pickle", "False") != "False" or given.get("trust_remote_code", "False") != "False":
        return True
    if name in FORBIDDEN_CALLS:
        return True
    if name == "load" and owner in ("np", "numpy"):
        return given.get("allow_pickle") != "False"
    if name == "load" and owner == "torch":
        return given.get("weights_only") != "True"
    if owner in OF_A_FOLDER and name in ("from_pretrained", "from_config"):
        loads_weights = owner.startswith("AutoModel") and name == "from_pretrained"
        is_safe = not loads_weights or given.get("use_safetensors") == "True"
        return given.get("trust_remote_code") != "False" or not is_safe
    return False
