"""``coordinator check`` refuses what a run would fail of later: a type of model that is none, ports of others."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

from tandem.config.schema import NewModel
from tandem.samples.model_files import write_new_model
from tests.harness.ports import free_port
from tests.harness.runs.running import PPO, TINY, coordinator, merged, write_config


def refused(over: dict[str, Any]) -> list[str]:
    ended = coordinator("check", write_config(over))
    assert ended.returncode in (1, 2), ended.stdout
    return [line.removeprefix("error: ") for line in ended.stderr.splitlines() if not line.startswith("note: ")]


def test_a_model_of_no_type_is_refused_whether_it_is_there_or_not(tmp_path: Path) -> None:
    new = TINY["policy"]["new_model"]
    write_new_model(Path("model"), NewModel(config=new["config"], characters=new["characters"]))
    # The folder is there, and nothing would be made of this.
    (line,) = refused({"policy": {"new_model": {"config": {"model_type": "qwen33"}}}})
    key = "policy.new_model.config.model_type"
    assert line == f"{key}: transformers has no model type 'qwen33'; did you mean 'qwen3'?"
    there = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(there | {"model_type": "qwen33"}))
    (line,) = refused({"policy": {"new_model": None}})
    assert line == (
        "policy.model_name: model: transformers has no model type 'qwen33' (config.json: model_type); "
        "did you mean 'qwen3'?"
    )


def test_ports_that_others_have_are_all_named_at_once() -> None:
    has_prometheus = importlib.util.find_spec("prometheus_client") is not None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        logger = {"page": port} | ({"prometheus": {"port": port}} if has_prometheus else {})
        lines = refused({"cluster": {"address": f"tcp://127.0.0.1:{port}"}, "logger": logger})
    assert lines[0] == f"cluster.address: cannot listen on 'tcp://127.0.0.1:{port}': the port is in use"
    assert lines[1].startswith(f"logger.page: the page cannot listen on 127.0.0.1, port {port}: Address already in use")
    if has_prometheus:
        assert lines[2].startswith(f"logger.prometheus.port: cannot listen on 127.0.0.1:{port}: ")
    assert lines[2 + has_prometheus :] == [f"{2 + has_prometheus} problems"]


def test_one_port_for_two_is_refused() -> None:
    port = free_port()
    over = merged({"logger": {"page": port}}, {"cluster": {"address": f"tcp://127.0.0.1:{port}"}})
    (line,) = refused(over)
    assert line.startswith(f"logger.page: the page cannot listen on 127.0.0.1, port {port}: ")


def test_a_value_model_that_is_none_is_refused() -> None:
    Path("empty").mkdir()
    value = {"model_name": "empty"}
    (line,) = refused(merged(PPO, {"value": value}))
    assert line == "value.model_name: 'empty' holds no config.json, so it is not a model"
    Path("empty/config.json").write_text(json.dumps({"model_type": "qwen33"}))
    (line,) = refused(merged(PPO, {"value": value}))
    assert line == (
        "value.model_name: empty: transformers has no model type 'qwen33' (config.json: model_type); "
        "did you mean 'qwen3'?"
    )
