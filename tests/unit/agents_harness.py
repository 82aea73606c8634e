"""Agents for tests: programs in the working directory, which note what they were sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.common.messages import SampleScored
from tandem.samples.batch import SampleBatch

PRELUDE = """
import json, os, sys, time, urllib.error, urllib.request

order = json.load(sys.stdin) if not os.environ.get("STAYS") else {}


def post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def ask(messages, order=order, **more):
    what = {"model": "policy", "messages": messages, "logprobs": True, "return_token_ids": True, **more}
    return post(f"{order['base_url']}/chat/completions", what)


def text(answer):
    return answer["choices"][0]["message"]["content"]


def user(said):
    return {"role": "user", "content": said}


def assistant(answer):
    return {"role": "assistant", "content": text(answer)}


def reward(value, order=order, **more):
    return post(f"{order['session_url']}/reward", {"reward": value, **more})


def note(*answers, order=order):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([order, answers]) + "\\n")
"""
"""What programs of agents begin with; it needs nothing but Python."""


def write_agent(source: str, name: str = "agent.py", prelude: str = PRELUDE) -> tuple[str, ...]:
    """Write a program to the working directory; return how it is started."""
    Path(name).write_text(prelude + source)
    return sys.executable, name


def seen() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return what episodes were asked to play, with all that they were answered."""
    lines = Path("seen.jsonl").read_text().splitlines() if Path("seen.jsonl").exists() else []
    return [(order, answers) for order, answers in map(json.loads, lines)]


def tokens_of(answer: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Return the tokens before a response, its own, and their log-probabilities, as an agent was sent them."""
    (choice,) = answer["choices"]
    return (
        answer["prompt_token_ids"],
        choice["token_ids"],
        [token["logprob"] for token in choice["logprobs"]["content"]],
    )


def sequences(arrays: SampleBatch) -> list[SampleBatch]:
    """Return the sequences of a sample one by one."""
    return [arrays.take([row]) for row in range(len(arrays.lengths_S))]


def assert_recorded_as_seen(scored: SampleScored, arrays: SampleBatch, answers: list[dict[str, Any]]) -> None:
    """Each response is in a branch, its tokens and log-probabilities as sent, and counts exactly once."""
    found = sequences(arrays)
    counted = [np.zeros(len(sequence.token_ids_T), dtype=int) for sequence in found]
    for answer in answers:
        prompt_ids, token_ids, logprobs = tokens_of(answer)
        whole, place = [*prompt_ids, *token_ids], slice(len(prompt_ids), len(prompt_ids) + len(token_ids))
        in_branches = [
            number
            for number, sequence in enumerate(found)
            if sequence.token_ids_T[: len(whole)].tolist() == whole and sequence.loss_mask_T[place].all()
        ]
        assert len(in_branches) == 1, "it counts once"
        (number,) = in_branches
        assert found[number].generation_logprobs_T[place].tolist() == np.float32(logprobs).tolist()
        counted[number][place] += 1
    for sequence, count, branch in zip(found, counted, scored.branches, strict=True):
        assert count.tolist() == sequence.loss_mask_T.astype(int).tolist(), "nothing else counts"
        assert branch.num_tokens == len(sequence.token_ids_T)
        assert branch.num_made == sequence.loss_mask_T.sum()
        assert branch.prompt_length == sequence.loss_mask_T.argmax()
    assert scored.response_length == sum(len(tokens_of(answer)[1]) for answer in answers)
    assert scored.num_turns == len(answers)


def assert_probable(arrays: SampleBatch, models: dict[int, Any]) -> None:
    """Log-probabilities are Hugging Face's, of the model of each token's version."""
    for sequence in sequences(arrays):
        token_ids = torch.from_numpy(sequence.token_ids_T.astype(np.int64))
        for version, model in models.items():
            with torch.no_grad():
                logits_TV = model(input_ids=token_ids[None]).logits[0, :-1].float()
            expected_T = logits_TV.log_softmax(dim=-1).gather(1, token_ids[1:, None])[:, 0].numpy()
            mine_T = sequence.versions_T[1:] == version
            np.testing.assert_allclose(sequence.generation_logprobs_T[1:][mine_T], expected_T[mine_T], atol=2e-5)
        assert {*sequence.versions_T[sequence.loss_mask_T].tolist()} <= models.keys()
