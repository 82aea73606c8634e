"""Two clients with keys of their own train and sample at once, and are to each other as if they were not there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.calls import calls_of
from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.running import wait_until
from tests.harness.tinker.server import Served, served

_CLOSE = 1e-5
_KEYS = ("me", "another")
_ADAPTERS = {"policy": {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}}}
_MOST_TOKENS = 2000
"""Tokens that a key may have in progress: four of the gradients that clients have waiting have as many."""


def test_two_keys_at_once_are_what_each_is_alone_and_reach_nothing_of_each_other() -> None:
    with served(_ADAPTERS, "--models", "2", "--tokens", str(_MOST_TOKENS)) as server:
        alone = [server.client("keyed", str(seed), key=key) for seed, key in enumerate(_KEYS)]
        clients = [server.start("keyed", str(seed), key, key=key) for seed, key in enumerate(_KEYS)]

        def is_over() -> bool:
            return any(client.poll() is not None for client in clients)

        def meet(what: str) -> None:
            for key in _KEYS:
                wait_until(Path(f"{key}-{what}.ready").exists, server.command.output, is_over)

        meet("begun")
        _check_limit_of_models(server)
        for key in _KEYS:
            Path(f"{key}-begun.killed").touch()
        meet("held")
        _check_reach(server)
        for key in _KEYS:
            Path(f"{key}-held.killed").touch()
        at_once = [server.result_of(client) for client in clients]
        server.command.signal(signal.SIGINT)
        assert server.command.wait() == 0
    for before, now in zip(alone, at_once, strict=True):
        assert now["trained"] == [pytest.approx(each, abs=_CLOSE) for each in before["trained"]]
        assert now["sampled"] == [pytest.approx(each, abs=_CLOSE) for each in before["sampled"]]
        assert now["models"] == [before["model"], now["model"]]
        assert {*now["listed"]} - {*before["paths"]} == {*now["paths"]}
        *begun, (status, why) = now["statuses"]
        assert [each[0] for each in begun] == [200] * len(begun), "whatever the other key has in progress"
        assert (status, "tokens of this key are in progress" in why) == (429, True), why
    assert at_once[0]["trained"] != at_once[1]["trained"]
    with read_journal(Path("run")) as journal:
        assert {call.key for call in calls_of(journal)} == {*_KEYS}


def _check_limit_of_models(server: Served) -> None:
    """Check that a third model is refused to both keys, which have one each."""
    for key in _KEYS:
        status, text = server.ask("POST", "create_session", {"sdk_version": "0.38.0"}, key=key)
        assert status == 200, text
        session = json.loads(text)["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        status, text = server.ask("POST", "create_model", body, key=key)
        assert (status, "2 models are being trained, 1 of them of this key" in text) == (429, True), text
        assert server.ask("POST", f"sessions/{session}/finish", {}, key=key)[0] == 204


def _check_reach(server: Served) -> None:
    """Check that each key is told that what the other has does not exist."""
    for key, other in (_KEYS, reversed(_KEYS)):
        found = json.loads(Path(f"{other}.json").read_text())
        model_id, (path, sampler_path), sampler = found["model"], found["paths"], found["sampler"]
        session = model_id.partition(":")[0]
        prompt: dict[str, Any] = {"chunks": [{"type": "encoded_text", "tokens": [4]}]}
        own = json.loads(server.ask("POST", "create_session", {"sdk_version": "0.38.0"}, key=key)[1])["session_id"]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("get_info", {"model_id": model_id}),
            ("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}}),
            ("save_weights", {"model_id": model_id, "seq_id": 1}),
            ("load_weights", {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}),
            ("weights_info", {"tinker_path": path}),
            ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": sampler_path}),
            ("asample", {"sampling_session_id": sampler, "seq_id": 999, "prompt": prompt, "sampling_params": {}}),
            ("retrieve_future", {"request_id": f"{model_id}:1"}),
            ("retrieve_futures", {"target": {"sampling_session_id": sampler}}),
            ("session_heartbeat", {"session_id": session}),
            (f"sessions/{session}/finish", {}),
        ]
        for call, body in asked:
            status, text = server.ask("POST", call, body, key=key)
            assert status in (404, 410), (call, status, text)
        assert server.ask("GET", f"training_runs/{model_id}", key=key)[0] == 404
        assert server.ask("GET", f"samplers/{sampler}", key=key)[0] == 404
        assert server.ask("POST", f"sessions/{own}/finish", {}, key=key)[0] == 204
