"""What ``coordinator serve`` and ``coordinator chat`` refuse on one line, before anything starts."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_harness
import pytest
from serving_harness import MAX_LENGTH, Driving, make_model, served, write_tokenizer

from tandem.coordinator.cli import main
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.observe.run_folder.found_models import models_in
from tests.harness.ports import refusing_port

Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    make_model(folder).save_pretrained(folder)
    return folder


@pytest.fixture
def model(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model in a folder that is the working directory."""
    folder = tmp_path / "model"
    shutil.copytree(weights, folder)
    monkeypatch.chdir(tmp_path)
    return Path("model")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr("os.execv", never)
    monkeypatch.setattr("subprocess.Popen", never)

    def refuse(*words: str | Path) -> str:
        assert main([str(word) for word in words]) in (1, 2)
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        return line

    return refuse


def checkpoints_in(model: Path, root: Path, steps: int) -> CheckpointFolder:
    found = CheckpointFolder(root, keep_top_k=None, higher_is_better=True)
    for step in range(1, steps + 1):
        shutil.copytree(model, Path(found.temporary_pattern.format(step=step)) / "policy")
        found.publish(CheckpointRecord(step=step, version=step, metric_name="", metric=None, config_json="{}"))
    return found


def test_folders(model: Path, refusal: Refusal) -> None:
    assert refusal("serve", "modell") == "error: modell: there is no such folder; did you mean 'model'?"
    assert refusal("serve", ".").startswith("error: . holds no model: no config.json, ")
    assert refusal("serve", ".").endswith("; in it model does")
    assert "holds no model" in refusal("chat", "/")


def test_of_checkpoints_the_newest_is_found(model: Path) -> None:
    checkpoints_in(model, Path("checkpoints"), 12)
    for typed in ("checkpoints", "checkpoints/step_12", "checkpoints/step_12/policy", "checkpoints/latest"):
        (found,) = models_in(Path(typed))
        assert (found.folder.resolve(), found.name) == (Path("checkpoints/step_12/policy").resolve(), "step_12")
    assert [found.name for found in models_in(model)] == ["model"]


def test_weights(model: Path, refusal: Refusal) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    assert refusal("serve", model) == "error: model has a config.json and no weights: there are no *.safetensors"
    file.write_bytes(whole)
    (model / "tokenizer.json").unlink()
    assert "cannot load a tokenizer from 'model'" in refusal("serve", model)


def test_a_damaged_checkpoint(model: Path, refusal: Refusal) -> None:
    folder = checkpoints_in(model, Path("checkpoints"), 1).folder_of(1)
    (folder / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in refusal("serve", folder)


def test_a_tokenizer_without_an_end(model: Path, refusal: Refusal) -> None:
    write_tokenizer(model)
    path = model / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"<eos>"', "null"))
    assert "no end-of-sequence token" in refusal("serve", model)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: others can reach it: give a --token that they must have"),
        (["--host", "::"], "--host ::: others can reach it: give a --token that they must have"),
        (["--host", "nowhere.invalid"], "--host nowhere.invalid: it is not an address of this machine"),
        (["--port", "70000"], "--port 70000: it must be from 0 to 65535"),
        (["--max-length", "129"], "--max-length 129: the model was made for sequences of at most 128 tokens"),
        (["vllm_cfg.enforce_eager=true"], "command line: vllm_cfg.enforce_eager=true: a setting of vLLM"),
        (["--engine", "vllm", "vllm_cfg.enforce_eagre=true"], "unknown key; did you mean 'enforce_eager'?"),
        (["--engine", "vllm", "vllm_cfg.tensor_parallel_size=no"], "vllm_cfg.tensor_parallel_size: "),
        (["--engine", "vllm"], "--engine vllm: vLLM is not installed; the embedded engine is --engine transformers"),
        (["--engine", "vllm", "vllm_kwargs.seed=1"], "vllm_kwargs.seed: "),
    ],
)
def test_options(model: Path, refusal: Refusal, words: list[str], line: str) -> None:
    assert line in refusal("serve", model, *words)


def test_a_port_that_is_taken(model: Path, refusal: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal("serve", model, "--port", str(port))
    assert line == f"error: --port {port}: cannot listen at 127.0.0.1: Address already in use; 0 takes any that is free"


def test_whom_to_talk_to(model: Path, refusal: Refusal) -> None:
    assert refusal("chat") == "error: give the FOLDER of a model, or the --url of a server"
    assert "or the --url" in refusal("chat", model, "--url", "http://127.0.0.1:9")
    assert "expected an address such as" in refusal("chat", "--url", "ftp://x")
    assert "expected an address such as" in refusal("chat", "--url", "http://")
    with refusing_port() as port:
        assert "Connection refused" in refusal("chat", "--url", f"http://127.0.0.1:{port}")


def test_a_model_that_is_not_served(weights: Path, model: Path, refusal: Refusal) -> None:
    hugging_face = engine_harness.make_model("llama", model)
    driving = Driving(engine_harness.make_engine(model, hugging_face, max_length=MAX_LENGTH))
    with driving, served(driving, write_tokenizer(model), token="secret") as url:
        line = refusal("chat", "--url", url, "--token", "secret", "--model", "tinny")
        assert line == f"error: --model tinny: {url} serves tiny; did you mean 'tiny'?"
        assert "Authorization: Bearer TOKEN is missing or wrong" in refusal("chat", "--url", url)
