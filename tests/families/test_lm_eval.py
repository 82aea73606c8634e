"""lm-eval 0.4.13 against `coordinator serve`: every score is that of its own model of Transformers.

`tox -e families` installs it apart; `TANDEM_LM_EVAL` names the folder. Its own tasks' data is on the Hub, that of these
in this file.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.runs import consoles
from tests.harness.runs.pages_harness import ROOT, code_of
from tests.harness.runs.running import TIMEOUT_S, Command

PACKAGES = os.environ.get("TANDEM_LM_EVAL", "")
pytestmark = pytest.mark.skipif(not Path(PACKAGES, "lm_eval").is_dir(), reason="lm-eval is not installed")
ROWS = (
    ("The capital of France is", ("Paris", "London", "Rome", "Berlin"), 0),
    ("Two and two make", ("three", "four", "five", "six apples"), 1),
    ("Ein Pfund sind", ("500 Gramm", "ein Kilo", "über 3 Liter", "naïve"), 0),
)
TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[answer]}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tiny_text": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n", "Question:"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
CHAT_TASKS = ("tiny_text",)
TOLERANCE = 1e-4 * 20
"""Of the sum over at most so many tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the working directory: a model whose samples are not all alike, with Qwen3's tokenizer, and the tasks."""
    folder = tmp_path_factory.mktemp("evaluated")
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(os.environ["TANDEM_FAMILIES"], "qwen3"))
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "tasks").mkdir()
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in ROWS]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        written = {"task": name, "test_split": "test", **data, **task}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(written))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Yield the address of the served model."""
    serve = ("coordinator", "serve", "model", "--name", "policy", "--port", "0", "--precision", "float32")
    with consoles.fork_server(), Command(*serve) as server:
        yield server.wait_for(r"serving policy at (http://\S+)/v1")[1]


def evaluate(words: list[str], out: str, folder: Path) -> dict[str, list[Any]]:
    """Run lm-eval; return what it was answered, by task, in the order of the rows."""
    where = [PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {
        "PYTHONPATH": os.pathsep.join(where),
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", *words, "--include_path", "tasks", "--output_path", out, "--log_samples"]
    ran = subprocess.run(
        command, cwd=folder, env={**os.environ, **told}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    answers: dict[str, list[Any]] = {}
    for file in (folder / out).rglob("samples_*.jsonl"):
        samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda each: each["doc_id"])
        (name,) = (name for name in TASKS if file.name.startswith(f"samples_{name}_"))
        answers[name] = [sample["resps"] for sample in samples]
    return answers


def documented(model: str, tasks: tuple[str, ...], url: str) -> list[str]:
    """Return the words of the documentation's command for a kind of model, these tasks and the server at `url`."""
    page = (ROOT / "docs" / "evaluation.md").read_text()
    lines = [line for code in code_of(page, "console") for line in code.splitlines() if f"--model {model} " in line]
    (line,) = lines
    words = shlex.split(line.removeprefix("$ "))
    words[words.index("--tasks") + 1] = ",".join(tasks)
    words[-1] = words[-1].replace("http://127.0.0.1:8000", url)
    return words


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Any]]:
    """Return the answers of lm-eval's model of Transformers."""
    words = ["lm_eval", "run", "--model", "hf", "--device", "cpu", "--model_args", "pretrained=model,dtype=float32"]
    return evaluate([*words, "--tasks", ",".join(TASKS)], "out_transformers", folder)


def test_completions_are_scored_as_transformers_does(folder: Path, url: str, expected: dict[str, list[Any]]) -> None:
    answers = evaluate(documented("local-completions", tuple(TASKS), url), "out_completions", folder)
    assert answers.keys() == expected.keys() == TASKS.keys()
    assert answers["tiny_text"] == expected["tiny_text"]
    assert any(text for (text,) in (answer[0] for answer in answers["tiny_text"])), "or nothing was generated"
    for row, expected_row in zip(answers["tiny_choice"], expected["tiny_choice"], strict=True):
        for ((logprob, is_greedy),), ((expected_logprob, expected_greedy),) in zip(row, expected_row, strict=True):
            assert float(logprob) == pytest.approx(float(expected_logprob), abs=TOLERANCE)
            assert is_greedy == expected_greedy
    for ((logprob,),), ((expected_logprob,),) in zip(
        answers["tiny_perplexity"], expected["tiny_perplexity"], strict=True
    ):
        assert float(logprob) == pytest.approx(float(expected_logprob), abs=TOLERANCE)


def test_chats_are_answered_with_the_models_own_template(folder: Path, url: str) -> None:
    answers = evaluate(documented("local-chat-completions", CHAT_TASKS, url), "out_chats", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for (question, _, _), ((text,),) in zip(ROWS, answers["tiny_text"], strict=True):
        message = {"role": "user", "content": f"Question: {question}\nAnswer:"}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        whole = tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
        assert text == whole.split("\n\n")[0].split("Question:")[0]
