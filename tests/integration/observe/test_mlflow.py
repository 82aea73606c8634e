"""MLflow: what a real run leaves in its files, and what is said where that cannot be."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from tandem.common.distribution import install_command
from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.running import coordinator, write_config

NAMES = {"train/reward": "reward", "train/loss": "loss", "validation/accuracy": "val_accuracy"}
TIMINGS = {"timing/train/total_step_time": "total", "timing/train/policy_training": "policy_training"}
SETTINGS = {"experiment_name": "tests", "run_name": "tiny"}
OVER: dict[str, Any] = {"logger": {"mlflow_enabled": True, "mlflow": SETTINGS}}

installed = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason=f"mlflow is not installed: {install_command('mlflow')}"
)


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # of this process, which reads them


@installed
def test_a_run_and_its_resumption_are_one_run_there() -> None:
    from mlflow import MlflowClient

    config = write_config(OVER)
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    ended = coordinator("up", config, "--resume", "grpo.max_num_steps=4")
    assert ended.returncode == 0, ended.stderr
    with read_journal(Path("run")) as journal:
        run_id = journal.run_id
        steps = {record.step: record for record in journal.steps()}
    client = MlflowClient(tracking_uri=Path("run/mlflow").absolute().as_uri())
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.tags["tandem.run_id"] == run_id
    assert run.data.params["grpo.num_prompts_per_step"] == "4"
    assert run.data.params["logger.mlflow.run_name"] == "tiny"
    for names, part in ((NAMES, "metrics"), (TIMINGS, "seconds")):
        for name, ours in names.items():
            kept = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
            recorded = {step: getattr(record, part) for step, record in steps.items()}
            assert kept == {step: values[ours] for step, values in recorded.items() if ours in values}
            assert list(kept) == ([2, 3, 4] if name.startswith("validation") else [1, 2, 3, 4])


@installed
def test_a_server_that_is_not_there_ends_in_a_line_and_begins_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    ended = coordinator("up", write_config(OVER), f"logger.mlflow.tracking_uri={address}")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: logger.mlflow_enabled: {address}: ")
    assert "launched" not in ended.stdout
    assert not Path("run").exists()


@installed
def test_what_a_server_does_not_take_is_sent_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow import MlflowClient

    from tandem.observe.exporters.telemetry import MlflowRun, MlflowWriter

    run = MlflowRun(tracking_uri=None, experiment="tests", name=None, run_id="1", config={"a": {"b:c": "x" * 9000}})
    writer = MlflowWriter(tmp_path / "run", run)
    writer.write(1, {"train/reward (of 2)": 0.5})
    files = tmp_path / "run" / "mlflow"
    files.rename(tmp_path / "away")
    writer.write(2, {"train/loss": 1.5})
    (tmp_path / "away").rename(files)
    writer.write(3, {"train/loss": 2.5})
    client = MlflowClient(tracking_uri=files.as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    history = client.get_metric_history(kept.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(2, 1.5), (3, 2.5)]
    assert kept.data.metrics["train/reward _of 2_"] == 0.5
    assert kept.data.params == {"a.b_c": "x" * 6000}
    files.rename(tmp_path / "away")
    writer.close()
    assert capsys.readouterr().err == f"logger.mlflow: the end of the run could not be sent to {files.as_uri()}\n"
