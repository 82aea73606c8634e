"""A run that goes on is talked to: `coordinator serve` and `coordinator chat` of its folder, by its own rollouts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.observe.run_folder.live import read_engine_servers
from tests.harness.runs.record_harness import record_of
from tests.harness.runs.running import (
    BIN,
    DIGITS,
    TIMEOUT_S,
    Command,
    coordinator,
    merged,
    process_of,
    wait_until,
    weights_of,
    write_config,
)

RUN = Path("run")
GATE = Path("go")
"""The environment scores nothing before this file is there."""
GATED = DIGITS.replace(
    "        correct =",
    f"""        import time
        from pathlib import Path
        while not Path({str(GATE)!r}).exists():
            time.sleep(0.01)
        correct =""",
)
ENDPOINT: dict[str, Any] = {"policy": {"generation": {"expose_http_server": True}}}
LONG: dict[str, Any] = merged(
    ENDPOINT,
    {
        "policy": {
            "max_total_sequence_length": 4000,
            "generation": {"colocated": {"enabled": False}, "transformers_cfg": {"num_slots": 8}},
            "new_model": {"config": {"max_position_embeddings": 4096}},
        },
        "env": {"digits": {"class": "digits.Digits", "timeout_s": TIMEOUT_S}},
        "cluster": {"rollouts": 2, "deadlines": {"generate_s": TIMEOUT_S}},
        "refit": {"alias": "never"},
    },
)
"""Two rollouts with devices of their own, and room for answers that take seconds."""


@contextlib.contextmanager
def running(config: dict[str, Any]) -> Iterator[Command]:
    """Have a run wait for the gate, its rollouts answering."""
    path = write_config(config)
    Path("digits.py").write_text(GATED)
    with Command("coordinator", "up", path) as run:
        for index in range(config.get("cluster", {}).get("rollouts", 1)):
            run.wait_for(rf"rollout-{index} answers OpenAI's API at http://127.0.0.1:\d+/v1")
        yield run


@contextlib.contextmanager
def served() -> Iterator[tuple[Command, openai.OpenAI]]:
    """Serve the run; yield the command and a client of it."""
    with Command("coordinator", "serve", RUN, "--port", "0", "--token", "secret") as server:
        url = server.wait_for(r"serving policy at (http://\S+)/v1")[1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=TIMEOUT_S) as client:
            yield server, client


def complete(client: openai.OpenAI, max_tokens: int = 8, **how: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True}
    settings = {"max_tokens": max_tokens, "prompt": "1 + 1 = ", "extra_body": extra, **how}
    return client.completions.with_raw_response.create(model="policy", **settings)


def samples() -> dict[Any, Any]:
    """Return what is recorded of each sample, its arrays to the bit."""
    return {
        (step, row.scored.group, row.scored.sample): (
            row.scored,
            {name: frame.tobytes() for name, frame in row.arrays.columns.items()},
        )
        for step, rows in record_of(RUN).items()
        for row in rows
    }


def test_a_run_with_guests_is_the_run_without_to_the_bit() -> None:
    over = {"grpo": {"max_num_steps": 6}, "checkpointing": {"save_period": 6}}
    assert coordinator("up", write_config(over)).returncode == 0
    alone = samples(), weights_of(RUN / "checkpoints" / "step_6")
    RUN.rename("alone")
    answers: list[Any] = []
    with running(merged(over, ENDPOINT)) as run:
        servers = read_engine_servers(RUN)
        assert servers is not None
        with openai.OpenAI(base_url=f"{servers['rollout-0'].url}/v1", api_key="none", max_retries=0) as client:

            def ask() -> None:
                with contextlib.suppress(openai.OpenAIError):  # the run ends
                    while True:
                        answers.append(complete(client, 12).parse())

            external_requests = [threading.Thread(target=ask) for _ in range(3)]
            for guest in external_requests:
                guest.start()
            wait_until(lambda: len(answers) > 3, lambda: run.output())
            GATE.touch()
            assert run.wait() == 0, run.output()
            for guest in external_requests:
                guest.join(TIMEOUT_S)
    assert max(answer.weight_versions[-1] for answer in answers) > 0, "they were answered while it trained"
    assert (samples(), weights_of(RUN / "checkpoints" / "step_6")) == alone
    assert not (RUN / "external_requests.json").exists()


def test_a_client_a_rollout_and_the_run_leave_in_mid_stream() -> None:
    with running(LONG) as run, served() as (server, client):
        assert (RUN / "external_requests.json").stat().st_mode & 0o077 == 0
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another").models.list()
        refused = coordinator("serve", RUN, "--max-batch-size", "4")
        assert refused.returncode == 2
        assert "--max-batch-size: the run in run goes on and its engines answer" in refused.stderr
        by = {complete(client).headers["x-tandem-rollout"] for _ in range(6)}
        assert by == {"rollout-0", "rollout-1"}, "they take turns"
        answer = complete(client, logprobs=0, seed=3).parse()
        assert answer.weight_versions == [0]
        assert len(answer.choices[0].token_ids) == len(answer.choices[0].logprobs.token_logprobs) == 8
        talk = [BIN / "coordinator", "chat", RUN, "--max-tokens", "4"]
        said = subprocess.run(talk, input="1\n/quit\n", capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert "talking to policy" in said.stdout, said.stderr
        assert "(weights of step 0)" in said.stdout, said.stderr

        # A client leaves.
        with complete(client, 3900, stream=True).parse() as stream:
            next(iter(stream))
        # The rollout that answers is killed.
        raw = complete(client, 3900, stream=True)
        name, stream = raw.headers["x-tandem-rollout"], raw.parse()
        next(iter(stream))
        process_of(run, "rollout", int(name[-1])).kill()
        with pytest.raises(openai.APIError, match=f"{name} is gone, and with it the rest of this answer"):
            list(stream)
        assert complete(client).headers["x-tandem-rollout"] != name, "another answers"
        run.wait_for(rf"{name} is lost")
        wait_until(lambda: len(read_engine_servers(RUN) or {}) == 2, run.output)

        # The run ends.
        stream = complete(client, 3900, stream=True).parse()
        next(iter(stream))
        run.signal(signal.SIGINT)
        run.signal(signal.SIGINT)
        with pytest.raises(openai.APIError):
            list(stream)
        run.wait()
        assert server.wait() == 0, server.output()
        assert "the run in run has ended; coordinator serve run serves its newest checkpoint" in server.output()
        assert "Traceback" not in server.output() + run.output()


def test_a_run_that_answers_nobody_says_what_to_switch_on() -> None:
    with running_quietly() as run:
        with Command("coordinator", "serve", RUN, "--port", "0") as server:
            server.wait_for("note: the run in run is live, but its newest checkpoint is served; policy.generation.")
            server.wait_for(r"serving run-step_\d+ at")
        run.signal(signal.SIGINT)
        run.signal(signal.SIGINT)


@contextlib.contextmanager
def running_quietly() -> Iterator[Command]:
    """Have a run without endpoints go on that has a checkpoint."""
    over = {"grpo": {"max_num_steps": 100_000}, "checkpointing": {"save_period": 1, "keep_top_k": None}}
    with Command("coordinator", "up", write_config(over)) as run:
        wait_until(lambda: (RUN / "checkpoints" / "step_1").exists(), run.output)
        yield run
