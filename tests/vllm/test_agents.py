"""Agents, evaluation and the endpoint of a run whose engine is vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from agents_harness import PRELUDE, assert_recorded_as_seen, seen, tokens_of

from tandem.samples.recorded_shards import read_step
from tests.harness.runs.agent_run_harness import branches_of, configure, model_after
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.running import coordinator, steps_of
from tests.harness.trainers.reference import logprobs_of

TREE = """
def streamed(messages):
    what = {"messages": messages, "stream": True, "logprobs": True, "return_token_ids": True}
    request = urllib.request.Request(
        order["base_url"] + "/chat/completions", json.dumps(what).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    pieces = [chunk["choices"][0] for chunk in chunks]
    choice = {
        "token_ids": [token for piece in pieces for token in piece.get("token_ids") or []],
        "logprobs": {"content": [one for piece in pieces for one in (piece["logprobs"] or {"content": []})["content"]]},
        "message": {"content": "".join(piece["delta"].get("content") or "" for piece in pieces)},
    }
    return {"prompt_token_ids": chunks[0]["prompt_token_ids"], "choices": [choice], "num_chunks": len(chunks)}


first = [user(order["problem"]["question"])]
a = ask(first)
b = streamed([*first, assistant(a), user("= ")])
c = ask([*first, assistant(a), user("- ")])
note(a, b, c)
said = text(b) + text(c)
reward(sum(map(str.isdigit, said)) / (len(said) + 1))
"""
"""One response that two ways go on from, of which one is streamed."""
OVER: dict[str, Any] = {
    "grpo": {"max_num_steps": 2},
    "policy": {
        "new_model": {"config": {"hidden_size": 64, "head_dim": 32, "initializer_range": 0.2}},
        "max_total_sequence_length": 48,
        "optimizer": {"kwargs": {"lr": 0.05}},
        "generation": {
            "backend": "vllm",
            "vllm_kwargs": {"kv_cache_memory_bytes": 2**26},
        },
    },
    "refit": {"verify": "full"},
    "cluster": {"deadlines": {"build_s": 240.0}},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a run of two steps, a refit between them."""
    folder = tmp_path_factory.mktemp("played")
    with in_folder(folder):
        ended = coordinator("up", configure(OVER, source=PRELUDE + TREE))
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture
def run(played: Path) -> Path:
    """Copy that folder to the working directory."""
    shutil.copytree(played, ".", dirs_exist_ok=True, symlinks=True)
    return Path("run")


def test_every_token_is_recorded_as_it_was_sent_once_in_two_branches(run: Path) -> None:
    sent = {(o["step"], o["problem"]["problem_id"], o["sample"]): answers for o, answers in seen()}
    assert len(sent) == 16
    for step in (1, 2):
        for sample in read_step(run / "samples", step):
            answers = sent.pop((step, sample.problem_id, sample.scored.sample))
            assert_recorded_as_seen(sample.scored, sample.arrays, answers)
            (a, made, _), (b, *_), (c, *_) = map(tokens_of, answers)
            assert b[: len(a) + len(made)] == [*a, *made] == c[: len(a) + len(made)]
            assert len(sample.scored.branches) == 2
            assert answers[1]["num_chunks"] > 2, "it came in parts"
    assert not sent
    assert {step.metrics["avg_branches_per_sample"] for step in steps_of()} == {2.0}


def test_probabilities_are_those_of_the_trainers_weights_of_the_version_that_each_token_says(run: Path) -> None:
    for sample in read_step(run / "samples", 2):  # after a refit; the weights of step 1 are in no checkpoint
        assert (sample.scored.oldest_version, sample.scored.newest_version) == (1, 1)
        for token_ids, mask, logprobs in branches_of(sample):
            with torch.no_grad():
                expected = logprobs_of(model_after(1), token_ids)
            torch.testing.assert_close(logprobs[mask], expected[mask], atol=1e-4, rtol=0)
    for step in steps_of():
        assert step.metrics["token_mult_prob_error"] < 1.001
    moved = [weight - model_after(1).state_dict()[name] for name, weight in model_after(2).state_dict().items()]
    assert max(float(change.abs().max()) for change in moved) > 1e-4


def test_greedy_samples_of_an_evaluation_are_the_embedded_engines(run: Path) -> None:
    said: dict[str, list[Any]] = {}
    how = ("eval.temperature=0", "eval.num_tests_per_prompt=1", "env={digits: {class: digits.Digits}}")
    for backend in ("vllm", "transformers"):
        engine = f"policy.generation.backend={backend}"
        settings = (*how, "data.environment=digits", engine, f"eval.save_path={backend}")
        done = coordinator("eval", "config.yaml", *settings, "--model", "run/checkpoints/step_2")
        assert done.returncode == 0, done.stdout + done.stderr
        problems = pq.read_table(f"{backend}/run-checkpoints-step_2.parquet").to_pylist()
        said[backend] = [(problem["problem_id"], problem["prompt"], problem["responses"]) for problem in problems]
    assert len({str(responses) for *_, responses in said["vllm"]}) > 1
    assert said["vllm"] == said["transformers"]
