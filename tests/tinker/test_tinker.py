"""Clients train and sample by the real SDK, with two trainers and an engine: the numbers are those of plain torch."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tandem.observe.run_folder.calls import calls_of
from tandem.observe.run_folder.journal import read_journal
from tests.harness import leaks
from tests.harness.processes import large_server
from tests.harness.runs.pages_harness import quoted
from tests.harness.runs.running import TIMEOUT_S, Command, all_gone, coordinator, process_of, wait_until
from tests.harness.tinker.server import CONFIG, ROOT, Served, served, serving, write_certificates, write_model

_CLOSE = 1e-5
_ADAPTERS = {"policy": {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}}}


def test_ten_steps_are_those_of_torch_and_requests_go_on_after_wrong_ones() -> None:
    with served() as server:
        found = server.client("steps")
        assert max(found.values()) < _CLOSE, found
        assert server.client("custom") < _CLOSE
        losses = server.client("pipelined")
        assert losses == sorted(losses, reverse=True), "each step is taken once, and in its place"
        assert len({*losses}) == 20
        found = server.client("wrong")
        assert found["after"]["loss:sum"] > 0
        said = {
            "negative": "token ids must be from 0 to",
            "vocabulary": "token ids must be from 0 to",
            "too long": "max_total_sequence_length is 32",
            "not finite": "weights: must be finite",
            "lengths": "must be float32, one for each of the 3 input tokens",
            "loss": "'gspo' is not served",
            "setting": "'entropy' of ppo is not served",
            "missing": "data[0].logprobs: must be float32",
            "several targets": "several targets at a position",
            "beta": "adam_params.beta1: 1.0, must be from 0 to below 1",
            "rate": "adam_params.learning_rate",
            "rank": "this server trains all weights: ask for rank=0",
            "base": "'another' is not served",
        }
        for name, text in said.items():
            assert text in found["errors"][name], (name, found["errors"][name])
        server.command.signal(signal.SIGKILL)
        server.command.wait()
    done = coordinator("replay", "run")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("equal to the bit to those of run", done.stdout)) == 4, done.stdout
    assert "train:0: 20 gradients and 10 steps: equal" in done.stdout


def test_absurd_requests_are_refused_and_leave_every_model_as_it_was() -> None:
    with served(_ADAPTERS, "--models", "2") as server:
        found = server.client("absurd")
        server.command.signal(signal.SIGINT)
        assert server.command.wait() == 0
        output = server.command.output()
    errors = found["errors"]
    assert re.search(
        r"the loss is -[\d.e+]+, not a number from -1e\+12 to 1e\+12; ratios of probabilities", errors["loss"]
    )
    assert "no step was taken: its gradient was dropped, because the loss is" in errors["step"]
    assert "gradient norm" in errors["norm"]
    assert "and 1e+12 is the most" in errors["norm"]
    assert found["unchanged"]
    assert found["sampled"] > 0
    assert "is lost" not in output, "no process is to blame"
    assert "look at" not in output, "what a run's warnings advise, a server does not have"


def test_saved_states_go_on_to_the_bit() -> None:
    with served() as server:
        found = server.client("saved")
    stale, gone, name = found.pop("errors")
    assert found == {
        "with_optimizer": True,
        "first_without": True,
        "second_without": False,
        "listed": True,
        "left": 0,
        "base": "base",
    }
    assert "has taken its place" in stale
    assert "there are no saved weights" in gone
    assert "must be letters, digits" in name
    assert not Path("out").exists()


def test_samples_of_two_engines_have_the_log_probabilities_of_the_published_weights() -> None:
    with served({"cluster": {"rollouts": 2}}) as server:
        found = server.client("samples")
        oldest, by_name, top, long = found.pop("errors")
    assert found.pop("worst") < _CLOSE
    assert found == {
        "tokens": [6, 6, 6],
        "differ": 3,
        "repeats": True,
        "first_is_none": True,
        "stopped": ["stop", True],
        "kept": {"samples": [True, True], "scores": [True, True, True]},
    }
    for error in (oldest, by_name):
        assert "are not kept any more" in error
        assert "keeps 2 published versions of a model, those that were used last" in error
    assert "topk_prompt_logprobs" in top
    assert "<= 20" in top
    assert "at most 31" in long


def test_the_likeliest_tokens_at_each_place_are_those_of_transformers() -> None:
    with served() as server:
        found = server.client("likeliest")
    assert found.pop("worst") < _CLOSE
    assert "prompt_logprobs_last_n: must be from 1" in found.pop("error")
    assert found == {
        "places": [11, 11, 5, 10],
        "first": None,
        "left_out": [None] * 14,
        "scores": True,
        "none": [None, None, None],
        "unchanged": True,
        "short": [None],
    }


@pytest.mark.parametrize("command", ["coordinator", large_server.__name__])
def test_the_ends_of_many_samples_are_asked_for_together_where_there_are_many_engines(command: str) -> None:
    with served(command=command) as server:
        found = server.client("many")
        assert found == {"polls": command != "coordinator", "same": True, "differ": True, "stays": True}
        target = {"sampling_session_id": "session-0:sample:0"}
        assert server.ask("POST", "retrieve_futures", {"target": target})[0] == 404
        assert server.ask("POST", "retrieve_futures", {"target": target, "prev_cursor": -1})[0] == 422


def test_adapters_of_the_configured_rank_are_trained() -> None:
    with served({"policy": {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}}}) as server:
        found = server.client("adapters")
    assert found.pop("gap") < _CLOSE
    assert "trains adapters of rank 4: ask for rank=4" in found.pop("refused")
    assert found == {"again": True, "anew": True, "learns": True, "info": [True, 4]}


_MERGED = {"policy": {**_ADAPTERS["policy"], "generation": {"transformers_cfg": {"adapter_sets": 1}}}}


@pytest.mark.parametrize("over", [_ADAPTERS, _MERGED], ids=["held together", "merged in turns"])
def test_two_models_side_by_side_are_those_that_each_is_alone(over: dict[str, Any]) -> None:
    with served(over, "--models", "2") as server:
        found = server.client("several")
        model_ids = server.client("crowd")
        server.command.signal(signal.SIGINT)
        assert server.command.wait() == 0
    assert "429" in found["third"]
    assert "2 models are being trained, 2 of them of this key" in found["third"]
    assert found["differ"]
    assert found["base"] < _CLOSE
    for way, (one, other) in found["gaps"].items():
        for trained, sampled in (one, other):
            assert trained == 0.0, (way, found)
            assert sampled < _CLOSE, (way, found)
    with read_journal(Path("run")) as journal:
        calls = [call for call in calls_of(journal) if call.kind == "forward_backward"]
    many, (one,) = ([call for call in calls if call.model == model_id] for model_id in model_ids)
    assert len(many) == 30
    between = [call for call in many if one.ended_at - one.seconds < call.ended_at < one.ended_at]
    assert len(between) <= 3, "one in progress, and one in its turn"
    done = coordinator("replay", "run")
    assert done.returncode == 0, done.stderr
    equal = re.findall(r"gradients?(?:, | and )\d+ steps?(?: and 1 saved state)?: equal to the bit", done.stdout)
    assert len(equal) == 6, done.stdout


def test_samples_of_two_models_are_made_together_without_bringing_weights_again() -> None:
    with served(_ADAPTERS, "--models", "2") as server:
        client = server.start("beside")
        wait_until(Path("counted.ready").exists, lambda: server.command.output(), lambda: client.poll() is not None)
        assert _versions(server) == 2, "each was published once"
        Path("counted.killed").touch()
        wait_until(Path("engine.ready").exists, lambda: server.command.output(), lambda: client.poll() is not None)
        assert _versions(server) == 3
        process_of(server.command, "rollout", 0).kill()
        Path("engine.killed").touch()
        found = server.result_of(client)
        assert _versions(server) == 4, "the model that the new engine lacked"
    gaps = found["gaps"]
    assert gaps.pop("published meanwhile") < 8, "others' samples keep no model from publishing"
    assert gaps.pop("unchanged") < _CLOSE
    assert gaps.pop("kept") < _CLOSE, "of the version before"
    assert all(gap < _CLOSE for both in gaps.values() for gap in both), gaps
    assert found["differ"]


def _versions(server: Served) -> int:
    return len(re.findall(r"version \d+ is published", server.command.output()))


def test_an_engine_and_a_trainer_of_two_models_are_killed_and_each_goes_on_from_what_it_saved() -> None:
    with served(_ADAPTERS, "--models", "2") as server:
        client = server.start("two_killed")
        for name, kind, index in (("engine", "rollout", 0), ("trainer", "trainer", 1)):
            wait_until(Path(f"{name}.ready").exists, lambda: server.command.output(), lambda: client.poll() is not None)
            process_of(server.command, kind, index).kill()
            Path(f"{name}.killed").touch()
        found = server.result_of(client)
    assert all("a trainer was" in lost for lost in found["lost"]), found
    for trained, sampled in found["gaps"]:
        assert trained == 0.0, found
        assert sampled < _CLOSE, found
    done = coordinator("replay", "run")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert len(re.findall("equal to the bit to those of run", done.stdout)) == len([*Path("run", "calls").iterdir()])


def test_an_engine_a_trainer_and_the_refit_service_are_killed() -> None:
    with served() as server:
        client = server.start("killed")
        for name, kind, index in (("engine", "rollout", 0), ("trainer", "trainer", 1), ("service", "refit", 0)):
            wait_until(Path(f"{name}.ready").exists, lambda: server.command.output(), lambda: client.poll() is not None)
            process_of(server.command, kind, index).kill()
            Path(f"{name}.killed").touch()
        found = server.result_of(client)
    assert found["gap"] < _CLOSE, "the engine in its place has the same weights"
    assert "a trainer was" in found["lost"]
    assert "a trainer was" in found["stale"]
    assert found["went_on"] == pytest.approx(found["losses"][1:], abs=_CLOSE), "from the saved state"


def test_an_engine_that_is_killed_as_soon_as_the_server_serves_is_replaced() -> None:
    write_model()
    Path("tinker.yaml").write_text(yaml.safe_dump(CONFIG))
    keys = {"me": coordinator("tinker", "keys", "me").stdout.strip()}
    with Command("coordinator", "tinker", "tinker.yaml", "--port", "0") as command:
        url = command.wait_for(r"serving the Tinker API at (https?://\S+?):? ")[1].rstrip(":")
        process_of(command, "rollout", 0).kill()
        command.wait_for("rollout-0 is lost(.|\n)*another is launched in its place")
        assert len(Served(command, url, keys).client("once")) == 4
    again = coordinator("tinker", "tinker.yaml", "--port", "0")
    assert again.returncode == 1
    assert "run already holds a run: set it aside with --restart" in again.stderr
    assert "--resume" not in again.stderr


def test_a_key_reaches_nothing_of_another() -> None:
    with served() as server:
        mine = server.start("owner")
        wait_until(Path("another.ready").exists, lambda: server.command.output(), lambda: mine.poll() is not None)
        model_id, path = json.loads(Path("mine.json").read_text())
        busy, load, index, delete = server.client("another", model_id, path, key="another")
        assert "a model of another key is being trained" in busy
        assert "there are no saved weights" in load
        assert "list index out of range" in index
        assert "there are no saved weights" in delete
        for call, body in (
            ("get_info", {"model_id": model_id}),
            ("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}}),
            ("save_weights", {"model_id": model_id, "seq_id": 2}),
            ("retrieve_future", {"request_id": f"{model_id}:1"}),
            ("session_heartbeat", {"session_id": model_id.partition(":")[0]}),
        ):
            status, text = server.ask("POST", call, body, key="another")
            assert status in (404, 410), (call, status, text)
        Path("another.killed").touch()
        assert server.result_of(mine), "nothing of it has changed"


def test_hostile_requests_are_refused_and_the_server_goes_on() -> None:
    with served() as server:
        _refuses(server)
        assert server.client("pipelined")[0] > 0


def _refuses(server: Served) -> None:
    assert server.ask("GET", "get_server_capabilities", key=None)[0] == 401
    assert server.ask("GET", "get_server_capabilities", key=None, headers={"X-API-Key": "tml-wrong"})[0] == 401
    assert server.ask("GET", "get_server_capabilities", headers={"Host": "evil.example"})[0] == 403
    assert server.ask("GET", "get_server_capabilities", headers={"Origin": "https://evil.example"})[0] == 403
    assert server.ask("GET", "get_server_capabilities")[0] == 200
    status, text = server.ask("POST", "client/config", {"sdk_version": "0.41.0"})
    assert status == 400
    assert "pip install tinker==0.38.0" in text
    status, text = server.ask("POST", "copy_weights", {})
    assert (status, "is not served" in text) == (404, True)
    odd = [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"session_id": 7}',
        b"\xff" * 100,
        b"[" * 100_000,
        b'{"model_id": "' + b"x" * 9999,
    ]
    for call in (
        "create_session",
        "create_model",
        "optim_step",
        "asample",
        "retrieve_future",
        "retrieve_futures",
        "load_weights",
    ):
        for body in odd:
            status, text = server.ask("POST", call, body)
            assert 400 <= status < 500, (call, body[:20], status, text)
    proto = {"Content-Type": "application/x-protobuf"}
    for body in (*odd[5:], b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256)), b"\x1a\x02\x0a\x00"):
        status, text = server.ask("POST", "forward_backward", body, proto)
        assert 400 <= status < 500, (body[:20], status, text)
    huge = bytes((1 << 26) + 1)
    assert server.ask("POST", "forward_backward", huge, proto)[0] == 413
    parts = urlsplit(server.url)
    with socket.create_connection((str(parts.hostname), parts.port)) as stalled:
        head = f"POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.keys['me']}\r\n"
        stalled.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert server.ask("GET", "healthz")[0] == 200, "others are answered meanwhile"


def test_clients_that_trust_its_ca_reach_it_by_tls() -> None:
    write_certificates()
    with served(None, "--tls-cert", "tls.pem", "--tls-key", "tls.key", "--host", "0.0.0.0") as server:
        assert "unencrypted" not in server.command.output()
        assert server.url.startswith("https://")
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        server.ca = Path("ca.pem")
        parts = urlsplit(server.url)
        with socket.create_connection((str(parts.hostname), parts.port), timeout=TIMEOUT_S) as stalled:
            began = time.monotonic()
            assert stalled.recv(1) == b"", "its handshake has not come"
            assert time.monotonic() - began < 50.0
        assert len(server.client("once")) == 4
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=TIMEOUT_S)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            server.ask("GET", "healthz")  # without TLS


def test_tokens_in_progress_are_limited_and_no_request_is_kept_out_by_those_that_wait_for_it() -> None:
    with served(None, "--tokens", "60") as server:
        found = server.client("crowded")
        answers = found["answers"]
        status, why = answers.pop("too large")
        assert (status, "up to 70 tokens, and a key may have 60" in why) == (400, True)
        for name in ("sample", "sixth"):
            status, why = answers.pop(name)
            assert (status, "60 tokens of this key are in progress" in why) == (429, True), why
        assert {name: status for name, (status, _) in answers.items()} == dict.fromkeys(
            ("third", "fourth", "fifth", "first", "second"), 200
        )
        assert found["count"] == 12
        refused = coordinator("tinker", "tinker.yaml", "--tokens", "0")
        assert "must be at least 1" in refused.stderr
        refused = coordinator("tinker", "tinker.yaml", "--models", "2")
        assert "--models 2: all weights are trained" in refused.stderr


def test_the_journal_has_every_call() -> None:
    with served(None, "--record", "0") as server:
        server.client("once")
        server.client("wrong")
        server.command.signal(signal.SIGINT)
        assert server.command.wait() == 0
    with read_journal(Path("run")) as journal:
        calls = calls_of(journal)
    assert not any(server.keys["me"] in f"{call}" for call in calls)
    assert {call.key for call in calls} == {"me"}
    first = calls[:5]
    assert [(call.kind, call.num_sequences, call.outcome) for call in first] == [
        ("create_model", 0, "done"),
        ("forward_backward", 5, "done"),
        ("optim_step", 0, "done"),
        ("save_weights_for_sampler", 0, "done"),
        ("sample", 1, "done"),
    ]
    assert first[1].num_tokens > 10
    assert first[4].num_tokens == 3 + 4
    assert first[4].model.startswith(first[0].model.partition(":")[0]), "the same session"
    assert all(0 < call.seconds < TIMEOUT_S for call in calls)
    assert [call.ended_at for call in calls] == sorted(call.ended_at for call in calls)
    failed = [call for call in calls if call.outcome != "done"]
    assert any("'gspo' is not served" in call.outcome for call in failed)
    assert coordinator("report", "run").returncode == 0
    assert not Path("run", "calls").exists()
    assert "has no record of calls: see coordinator tinker --record" in coordinator("replay", "run").stderr


def test_a_killed_server_leaves_nothing_and_clients_go_on_from_what_they_saved() -> None:
    segments = leaks.segments()
    with served() as server:
        client = server.start("survives")
        wait_until(Path("server.ready").exists, lambda: server.command.output(), lambda: client.poll() is not None)
        everybody = server.command.children()
        server.command.signal(signal.SIGKILL)
        assert server.command.wait() == -signal.SIGKILL
        assert all_gone(everybody, 30.0) == []
        assert leaks.segments_left(segments) == set()
        port = urlsplit(server.url).port
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port or 0)) != 0
    with served(None, "--restart", "--port", str(port), keys=server.keys) as again:
        Path("server.killed").touch()
        found = again.result_of(client)
    assert "there is no model" in found["lost"]
    assert found["same"]


def test_the_example_of_the_page_learns() -> None:
    typed = [words for words, _ in quoted((ROOT / "docs" / "tinker.md").read_text())]
    assert typed[0] == ["coordinator", "tinker", "keys", "me"]  # as `serving` makes one
    (*_, config), (*_, program) = typed[1], typed[3]
    assert (config, program) == ("examples/tinker.yaml", "examples/tinker_loop.py")
    with serving(ROOT / config, "logger.page=off", "cluster.threads_per_process=1") as server:
        words = [sys.executable, "-W", "ignore", str(ROOT / program), "--url", server.url]
        environment = {**os.environ, "TINKER_API_KEY": server.keys["me"]}
        done = subprocess.run(
            [*words, "--steps", "20"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"{done.stderr}\n{server.command.output()}"
    rewards = [float(each) for each in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > 0.25 + sum(rewards[:5]) / 5, rewards


def test_keys_and_configurations_are_checked() -> None:
    refused = coordinator("tinker", "tinker.yaml")
    assert refused.returncode == 2
    assert "coordinator tinker keys NAME" in refused.stderr
    key = coordinator("tinker", "keys", "me").stdout.strip()
    assert key.startswith("tml-")
    file = Path("tinker_keys.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert key not in file.read_text()
    write_certificates()
    for options, why in (
        (["--tls-cert", "tls.pem"], "give both, or neither"),
        (["--tls-cert", "tls.pem", "--tls-key", "none.key"], "none.key: there is no such file"),
        (["--tls-cert", "tls.pem", "--tls-key", "ca.key"], "cannot use them"),
        (["--tls-cert", "tls.key", "--tls-key", "tls.key"], "cannot use them"),
    ):
        refused = coordinator("tinker", "tinker.yaml", *options)
        assert refused.returncode == 2
        assert why in refused.stderr
    Path("tls.key").chmod(0o640)
    assert "chmod 600" in coordinator("tinker", "tinker.yaml", "--tls-cert", "tls.pem", "--tls-key", "tls.key").stderr
    file.chmod(0o644)
    assert "tinker_keys.json" in coordinator("tinker", "tinker.yaml").stderr
