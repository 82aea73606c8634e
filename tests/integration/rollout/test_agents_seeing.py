"""Whole runs of a vision model, whose agent sends it pictures: trainers learn from what the engine saw."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.observe.samples import trainer_logprobs
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import marked_in
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.running import Command, coordinator, merged, process_of, steps_of, write_config
from tests.harness.vision_models import encoded, picture, write_vision_model

AGENT = """
import base64, json, os, sys, urllib.error, urllib.request

order = json.load(sys.stdin)

def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}

def picture(name):
    data = base64.b64encode(open(name, "rb").read()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

def text(said):
    return {"type": "text", "text": said}

def ask(*messages):
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages, "max_tokens": 6})

number = order["sample"] % 2
first = {"role": "user", "content": [picture(f"{number}.png"), text(order["problem"]["question"])]}
again = {"role": "user", "content": [picture(f"{number + 1}.png"), text(order["problem"]["question"])]}
answer = ask(first)["choices"][0]["message"]
ask(again)
more = {"role": "user", "content": [text("and "), picture("3.png"), picture(f"{number}.png"), text("?")]}
last = ask(first, {"role": "assistant", "content": answer["content"]}, more)["choices"][0]["message"]["content"]
refused = ask({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]})
assert refused["status"] == 400, refused
assert "nothing is fetched over a network" in refused["error"]["message"], refused
share = len({*last} & {*"0123456789"}) / 10
post(os.environ["TANDEM_SESSION_URL"] + "/reward", {"reward": share})
"""
"""Asks in two branches of the same tokens with different pictures; the first goes on with two more."""
PICTURES = [encoded(picture(32, 32, seed)) for seed in range(4)]
DIGESTS = [hashlib.sha256(data).hexdigest() for data in PICTURES]
SEES: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 2, "val_period": 0},
    "policy": {
        "model_name": "sees",
        "new_model": None,
        "max_total_sequence_length": 192,
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
    },
    "data": {
        "dataset_name": "shapes",
        "task_params": {"size": 32},
        "num_train": 16,
        "num_validation": 4,
        "environment": "agent",
    },
    "checkpointing": {"enabled": False},
    "logger": {"samples": "all"},
}


def configure(over: dict[str, Any] | None = None) -> Path:
    """Write the model, the pictures, the program and the configuration of a run to the working directory."""
    write_vision_model("qwen2_5_vl", Path("sees"))
    Path("agent.py").write_text(AGENT)
    for number, data in enumerate(PICTURES):
        Path(f"{number}.png").write_bytes(data)
    env = {"env": {"agent": {"command": ["python", "agent.py"], "timeout_s": 120, "on_error": "fail"}}}
    return write_config(merged(merged(SEES, env), over or {}))


def check_steps(num_steps: int) -> None:
    """Check that each sample has the images that its agent sent, and that trainers and engines agree on its tokens."""
    images = ImageFolder(Path("run/images"))
    steps = steps_of()
    assert [step.step for step in steps] == [*range(1, num_steps + 1)]
    for step in steps:
        assert step.metrics["avg_branches_per_sample"] == 2
        assert step.metrics["grad_norm"] > 0.0
        recomputed = trainer_logprobs(Path("run"), step.step)
        samples = read_step(Path("run/samples"), step.step)
        assert len(samples) == 8
        for sample in samples:
            assert not sample.scored.failure
            arrays, number = sample.arrays, sample.scored.sample % 2
            (asked,) = marked_in(sample.question)
            # The second branch begins before the first goes on; a branch is in the order of its last response.
            again = [DIGESTS[number + 1], asked.digest]
            whole = [DIGESTS[number], asked.digest, DIGESTS[3], DIGESTS[number]]
            assert [row.tobytes().hex() for row in arrays.image_digests_IX] == [*again, *whole]
            assert arrays.num_images_S.tolist() == [2, 4]
            assert [each.digest for each in marked_in(sample.prompt)] == again
            made_T = arrays.loss_mask_T
            trainer_T = recomputed[sample.scored.group, sample.scored.sample]
            assert np.isfinite(trainer_T[made_T]).all()
            np.testing.assert_allclose(arrays.generation_logprobs_T[made_T], trainer_T[made_T], atol=1e-5)
            assert all(images.get(digest) for digest in (*again, *whole))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_an_agent_sends_pictures_and_the_trainer_learns_from_them(packed: bool) -> None:
    packing = {"sequence_packing": {"enabled": packed, "train_mb_tokens": 384}} if packed else {}
    ended = coordinator("up", configure({"policy": packing}), "cluster.trainers=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_steps(2)
    stored = {path.name for path in Path("run/images").glob("*/*")}
    assert {*DIGESTS[:4]} <= stored
    shown = coordinator("samples", "run", "--limit", "1")
    assert "image_pad" not in shown.stdout
    assert shown.stdout.count(f"[image 32×32 {DIGESTS[3][:6]}]") == 1, shown.stdout


def test_samples_with_pictures_are_restored_and_made_again() -> None:
    config = configure({"grpo": {"max_num_steps": 4}, "checkpointing": {"enabled": True, "save_period": 1}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 1/4")
        process_of(run, "rollout").kill()
        run.wait_for("step 2/4")
        run.process.kill()
        run.wait()
    ended = coordinator("up", config, "--resume")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_steps(4)
