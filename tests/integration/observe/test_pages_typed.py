"""The commands of the pages, typed against one short run; servers are started, asked, and stopped."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import tandem
from tests.harness.runs import python_api_harness
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.pages_harness import DOCS, code_of, quoted
from tests.harness.runs.running import BIN, SUMS, TIMEOUT_S, Command, coordinator, copy_examples

SHORT = [
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=2",
    "grpo.max_val_samples=4",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=16",
    "policy.logprob_batch_size=16",
    "checkpointing.save_period=2",
]
TYPED_BY = {
    "algorithms.md": "test_dpo_run.py",
    "asynchronous.md": "test_docs.py",
    "hub.md": "test_push.py",
    "index.md": "test_readme.py",
    "monitoring.md": "test_doctor.py",
    "planning.md": "test_simulated_steps.py",
    "quickstart.md": "test_quickstart.py",
    "refit.md": "test_docs.py",
    "replay.md": "test_docs.py",
    "runs.md": "test_runs_listed.py",
    "store.md": "test_store_runs.py",
    "tinker.md": "test_tinker.py",
    "training.md": "test_mtp.py",
}
"""Pages whose commands other tests type."""
OTHERS = {"migrating.md"}
"""Pages whose commands are of other projects."""
NOT_OURS = {"page.md": ["ssh"], "index.md": ["pip"], "evaluation.md": ["lm_eval"]}
"""Commands that are no part of this project."""
NEMO_EVALUATION = """
eval: {metric: "pass@k", num_tests_per_prompt: 1, seed: 42, k_value: 1}
generation:
  backend: vllm
  max_new_tokens: 8
  temperature: 1.0
  model_name: Qwen/Qwen2.5-Math-1.5B-Instruct
  vllm_cfg: {precision: float32, tensor_parallel_size: 1, max_model_len: 32}
tokenizer: {name: "${generation.model_name}"}
data: {dataset_name: held_out.csv, problem_key: Question, solution_key: Answer, max_input_seq_length: 32}
env: {math: {num_workers: 1}}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""


def commands(page: str) -> list[list[str]]:
    """Return the commands of a page that are ours, without the name of the program."""
    found = [words for words, _ in quoted((DOCS / page).read_text()) if words[0] not in NOT_OURS.get(page, [])]
    assert all(words[0] == "coordinator" for words in found), found
    return [words[1:] for words in found]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the examples and runs of the names that pages have for them, which tests only read."""
    folder = tmp_path_factory.mktemp("pages")
    with in_folder(folder):
        copy_examples()
        up, *_ = [words for words in commands("page.md") if words[0] == "up"]
        ended = coordinator(*up, *SHORT)
        assert ended.returncode == 0, ended.stderr
        assert re.search(r"^page: http://127\.0\.0\.1:\d+$", ended.stdout, re.MULTILINE), ended.stdout[:2000]
        for name in ("run", "results/first", "results/second", "results/destroyed", "results/math"):
            shutil.copytree("results/arithmetic", name, symlinks=True)
        Path("evals").mkdir()
        Path("evals/eval.yaml").write_text(NEMO_EVALUATION)
        rows = [f"{row['input']},{row['output']}\n" for row in SUMS[:3]]
        Path("held_out.csv").write_text("".join(["Question,Answer\n", *rows]))
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work beside the runs."""
    monkeypatch.chdir(made)
    return made


def test_every_page_with_commands_has_a_test_that_types_them() -> None:
    with_commands = {path.name for path in DOCS.glob("*.md") if "```console\n" in path.read_text()}
    here_typed = set(re.findall(r'"(\w+\.md)"', Path(__file__).read_text().partition("def here")[2]))
    for page, test in TYPED_BY.items():
        (file,) = DOCS.parent.glob(f"tests/**/{test}")
        typed = [word for words, _ in quoted((DOCS / page).read_text()) for word in words]
        configs = [word for word in typed if word.endswith(".yaml")]
        assert any(word in file.read_text() for word in (page, *configs)), (page, test)
    assert with_commands - TYPED_BY.keys() - here_typed == OTHERS


def test_those_of_evaluation(here: Path) -> None:
    *ours, during, nemo, served = commands("evaluation.md")
    assert [words[0] for words in (*ours, nemo)] == ["eval"] * 4
    assert served == ["serve", "results/arithmetic", "--name", "policy"], "as tests of serving type it"
    said = []
    for words in ours:
        assert words[1] == "examples/arithmetic.yaml"
        ended = coordinator(*words, *SHORT)
        assert ended.returncode == 0, (words, ended.stderr)
        said.append(ended.stdout)
    row = "results/arithmetic/checkpoints/step_2"
    assert row in said[0]
    assert row in said[1]
    assert "pass@8" in said[1]
    assert row in said[2]
    assert "results/arithmetic_sft/checkpoints/step_5" in said[2]
    table = json.loads(Path("results/arithmetic/eval/results.json").read_text())
    assert [len(table["models"]), table["num_tests_per_prompt"]] == [2, 1]
    assert [*Path("results/arithmetic").glob("eval*")] != [Path("results/arithmetic/eval")], "set aside"
    ended = coordinator(*during, *SHORT, *during[2:], "logger.log_dir=results/during")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^step 2: the checkpoint has held-out accuracy \d\.\d+", ended.stdout, re.MULTILINE), ended.stdout
    on_a_cpu = ["generation.backend=transformers", "cluster.gpus_per_node=0", "logger.log_dir=results/nemo"]
    ended = coordinator(*nemo, *on_a_cpu)
    assert ended.returncode == 0, ended.stderr
    assert "pass@16" in ended.stdout


def test_those_that_look_at_a_run(here: Path) -> None:
    for page, names in (
        ("samples.md", {"samples"}),
        ("diagnose.md", {"diagnose"}),
        ("bisect.md", {"bisect"}),
        ("performance.md", {"plan"}),
    ):
        found = commands(page)
        assert {words[0] for words in found} == names
        for words in found:
            if words[0] == "plan":
                words = [words[0], str(DOCS.parent / words[1])]
            words = ["2" if word == "12" else word for word in words]
            ended = coordinator(*words)
            assert ended.returncode == 0, (words, ended.stderr)
            assert ended.stdout


@contextlib.contextmanager
def stopped_by_ctrl_c(*words: str) -> Iterator[Command]:
    """Run a server; it ends by itself when it is asked to."""
    with Command("coordinator", *words) as server:
        yield server
        server.signal(signal.SIGINT)
        assert server.wait() in (0, 130), server.output()
        assert "Traceback" not in server.output()


def test_the_pages_of_runs(here: Path) -> None:
    views = [words for words in commands("page.md") if words[0] == "view"]
    assert len(views) == 2
    for words in views:
        with stopped_by_ctrl_c(*words, "--port", "0") as server:
            address = server.wait_for(r"page: (http://\S+)")[1]
        assert ("token=" in address) == ("--host" in words)


def test_those_of_serving(here: Path) -> None:
    import openai

    page = (DOCS / "serving.md").read_text()
    (serve, chat) = commands("serving.md")
    (by_url,) = re.findall(r"`coordinator (chat --url http://127.0.0.1:8000)`", page)
    (code,) = code_of(page, "python")
    with stopped_by_ctrl_c(*serve, "--port", "0") as server:
        url = server.wait_for(r"serving \S+ at (http://\S+)/v1")[1]
        names: dict[str, object] = {}
        exec(code.replace("http://127.0.0.1:8000", url).replace("step_20", "step_2"), names)
        client, answer = names["client"], names["answer"]
        assert isinstance(client, openai.OpenAI)
        client.close()
        assert len(answer.choices) == 4  # type: ignore[attr-defined]
        assert names["reply"].status in ("completed", "incomplete")  # type: ignore[attr-defined]
        talk(*by_url.replace("http://127.0.0.1:8000", url).split())
    talk(*chat)


def talk(*words: str) -> None:
    """Say something to a model, and leave."""
    done = subprocess.run(
        [BIN / "coordinator", *words], input="1+1\n/quit\n", capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert "talking to run-step_2" in done.stdout


def test_the_program_of_the_page_of_python() -> None:
    code, *_ = code_of((DOCS / "python.md").read_text(), "python")
    settings = python_api_harness.config("run", grpo={"max_num_steps": 2})
    settings["data"] = {"prompt_template": "{question}="}  # it says nothing of how many rows are held out
    Path("config.yaml").write_text(yaml.safe_dump(settings))
    Path("program.py").write_text(code)
    words = [sys.executable, "program.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \S+", line)]
    assert [int(step) for step, _ in steps] == [1, 2], done.stdout
    assert tandem.load_run("run").config.data.num_validation == 10, "a tenth of its rows"
