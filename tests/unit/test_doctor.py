"""`coordinator doctor`: what it finds on this machine, and that nothing that hangs or dies keeps it."""

from __future__ import annotations

import re
import socket
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
import yaml

from tandem.common.errors import ConfigError, TandemError
from tandem.config.schema import LinkRates
from tandem.coordinator import cli
from tandem.coordinator.doctor_steps import STEPS
from tandem.launch.doctor.look import carry_out_apart, look_at_machine
from tandem.launch.doctor.network import ProbeServer, measure_loopback, measure_peer, parse_address
from tandem.launch.doctor.steps import DoctorFinding, DoctorReport, DoctorStep, StepOutcome, format_links, report_of
from tests.harness.runs.pages_harness import DOCS, quoted
from tests.harness.runs.running import write_config

HAS_GPU = torch.cuda.is_available()
STANDS_IN = """
import json, os, sys, time
out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for name in sys.argv[3:]:
    print(json.dumps({"step": name}), file=out)
    if name == "cuda": time.sleep(600)
    if name == "torch": sys.exit("Illegal instruction")
    finding = {"name": name, "status": "ok", "says": sys.argv[2]}
    print(json.dumps({"step": name, "outcome": {"findings": [finding]}}), file=out)
"""
"""Carries out steps as the real program does, but dies in one of them and hangs in another."""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_whole_of_it_on_this_machine(in_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ((words, quotes),) = quoted((DOCS / "monitoring.md").read_text())
    assert cli.main([*words[1:], str(write_config()), "--json"]) == 0
    report = msgspec.json.decode(capfd.readouterr().out, type=DoctorReport)
    found = {finding.name: finding for finding in report.findings}
    assert {"Python", "shared memory", "open files", "clocks", "disk", "network"} <= found.keys()
    assert {step.finding for step in STEPS.values()} <= found.keys()
    for line in filter(re.compile("ok|missing|skipped").match, quotes):
        assert line[9:24].strip() in found, line
    assert found["torch"].says.startswith(torch.__version__)
    assert found["memory copy"].status == "ok"
    assert report.links["memory"] > 0.01
    assert "network" not in report.links, "loopback is not what is between nodes"
    if not HAS_GPU:
        for name in ("GPUs", "CUDA", "copy kernel", "CUDA IPC", "NCCL"):
            assert (found[name].status, found[name].says) == ("skipped", "no GPU")
        assert report.links.keys() == {"memory"}


def test_what_a_configuration_needs_and_is_missing_is_an_error(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [StepOutcome((DoctorFinding("vLLM", "missing", "not installed", "pip install it"),), {"memory": 4.0})]
    monkeypatch.setattr("tandem.launch.doctor.look.carry_out_apart", lambda *_: found)
    assert cli.main(["doctor", str(write_config())]) == 0
    printed = capsys.readouterr().out
    assert "missing  vLLM            not installed; pip install it\n" in printed
    assert "    memory: 4\n" in printed
    vllm = "policy.generation.backend=vllm"
    assert cli.main(["doctor", str(write_config()), vllm]) == 1
    assert capsys.readouterr().err.endswith("config.yaml cannot run here: vLLM\n")


def chosen(names: list[str]) -> dict[str, DoctorStep]:
    return {name: STEPS[name] for name in names}


def test_steps_that_die_or_hang_are_said_and_the_others_are_carried_out() -> None:
    need_cuda = [name for name, step in STEPS.items() if "cuda" in step.needs]
    assert need_cuda == ["kernel", "peers", "ipc", "nccl"]
    names = ["gpus", "cuda", *need_cuda, "vllm"]
    program = [sys.executable, "-c", STANDS_IN]
    found = [outcome.findings[0] for outcome in carry_out_apart(chosen(names), 3, 8.0, program)]
    assert [finding.name for finding in found[:2]] == ["gpus", "CUDA"]
    assert found[0].says == "3"
    assert (found[1].status, found[1].says) == ("missing", "hangs: no answer for 8 s")
    assert {finding.says for finding in found[2:-1]} == {"CUDA has failed"}
    assert len(found) == len(names)
    assert found[-1].status == "ok", "a new process goes on"
    died, memory, last = (
        outcome.findings[0] for outcome in carry_out_apart(chosen(["torch", "memory", "gpus"]), 1, 60.0, program)
    )
    assert (died.status, died.says) == ("missing", "ended its process (exit code 1): Illegal instruction")
    assert (memory.status, last.status) == ("skipped", "ok")


def test_a_folder_that_is_not_there_yet_is_on_some_disk(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in look_at_machine(tmp_path / "run" / "logs")}
    assert f"free for {tmp_path}/run/logs" in found["disk"].says


def test_a_listener_is_measured_from_elsewhere_and_survives_strangers() -> None:
    listener = ProbeServer("127.0.0.1", 0)
    answering = threading.Thread(target=lambda: [listener.answer_next() for _ in range(3)])
    answering.start()
    try:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        socket.create_connection(("127.0.0.1", listener.port)).close()
        rate = measure_peer(f"127.0.0.1:{listener.port}")
    finally:
        answering.join(60)
        listener.close()
    assert rate.sent > 0
    assert rate.received > 0
    assert rate.slower == min(rate.sent, rate.received)
    assert abs(rate.clock_ahead_s) < 60
    with pytest.raises(TandemError, match=f"--peer 127.0.0.1:{listener.port}: "):
        measure_peer(f"127.0.0.1:{listener.port}")


def test_the_rate_to_a_peer_is_for_the_planner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tandem.launch.doctor.look.carry_out_apart", lambda *_: [])
    listener = ProbeServer("127.0.0.1", 0)
    answering = threading.Thread(target=listener.answer_next)
    answering.start()
    try:
        assert cli.main(["doctor", "--peer", f"127.0.0.1:{listener.port}", "--json"]) == 0
    finally:
        answering.join(60)
        listener.close()
    report = msgspec.json.decode(capsys.readouterr().out, type=DoctorReport)
    assert report.links["network"] > 0
    assert {finding.name: finding.status for finding in report.findings}["clock of peer"] == "ok"
    assert cli.main(["doctor", "--peer", "elsewhere"]) == 2
    assert capsys.readouterr().err == "error: 'elsewhere' is not an address: it should be HOST:PORT\n"


def test_loopback() -> None:
    assert measure_loopback().slower > 0


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:99999", "host:port"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="it should be HOST:PORT"):
        parse_address(text)


def test_the_section_for_the_planner() -> None:
    links = yaml.safe_load(format_links({"memory": 4.321, "network": 11.0}))["cluster"]["links"]
    assert msgspec.convert(links, LinkRates) == LinkRates(memory=4.32, network=11.0)
    assert "# peer_gpu: 350  the default" in format_links({})


def test_the_report_keeps_what_was_found() -> None:
    missing, fine = DoctorFinding("torch", "missing", "gone"), DoctorFinding("vLLM", "missing", "not installed")
    report = report_of("here", [StepOutcome((missing, fine), {"memory": 1.0})], {"torch"})
    assert report.needed_but_missing == ("torch",)
    assert report.links == {"memory": 1.0}
