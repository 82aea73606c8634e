"""Metrics written to TensorBoard, Weights & Biases and MLflow, under NeMo-RL's names.

The journal has a step's metrics under short names (``reward``, ``val_accuracy``), and its seconds by phase. Dashboards
get them as ``train/reward``, ``validation/accuracy`` and ``timing/train/policy_training``. Metrics of a named
validation set (``val_easy/loss``) become ``validation-easy/loss``. So curves of both systems can be overlaid. Nothing
here imports torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tandem.common.distribution import install_command
from tandem.common.errors import ConfigError

VALIDATION_PREFIX = "val_"
"""Prefix of held-out metrics' short names."""

_TIMINGS = {
    "total": "total_step_time",
    "generation": "generation",
    "get_logprobs": "policy_and_reference_logprobs",
    "policy_training": "policy_training",
    "refit": "prepare_for_generation/transfer_and_update_weights",
    "validation": "total_validation_time",
    "checkpointing": "checkpointing",
}
"""NeMo-RL's names for the phases of a step; other phases keep their own."""


def dashboard_names(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Rename a step's metrics and seconds for dashboards."""
    named: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith(VALIDATION_PREFIX):
            part, slash, short = name.removeprefix(VALIDATION_PREFIX).rpartition("/")
            named[f"validation-{part}/{short}" if slash else f"validation/{short}"] = value
        else:
            named[f"train/{name}"] = value
    for phase, value in seconds.items():
        named[f"timing/train/{_TIMINGS.get(phase, phase)}"] = value
    return named


class WandbRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run's place on Weights & Biases. ``WANDB_MODE=offline`` and its other variables are respected."""

    project: str
    name: str | None
    """Name of the run; None lets the service choose."""
    run_id: str
    """Id of the run, which is continued if it exists there."""
    config: dict[str, Any]
    """The resolved configuration, shown beside the curves."""


class MlflowRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run's place on MLflow. ``MLFLOW_TRACKING_URI`` and its other variables are respected."""

    tracking_uri: str | None
    """Address of the server; None for that in the environment, or else files in the run folder."""
    experiment: str
    name: str | None
    """Name of the run; None lets MLflow choose."""
    run_id: str
    """Id of the run; a run with this tag is continued if it exists there."""
    config: dict[str, Any]
    """The resolved configuration; its values become the run's parameters."""


class MetricWriter(Protocol):
    """One dashboard."""

    def go_back_to(self, first_step: int) -> None:
        """Expect `first_step` and later steps to be written again."""
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics, named for dashboards."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class TensorBoardWriter:
    """Event files, written with the ``tensorboard`` package itself, which torch's writer wraps."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Hide what an earlier, interrupted run wrote from `first_step` on."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._file = EventFileWriter(str(folder))
        self._restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self.go_back_to(first_step)

    def go_back_to(self, first_step: int) -> None:
        """Hide what was written from `first_step` on."""
        self._file.add_event(self._event(wall_time=time.time(), step=first_step, session_log=self._restart))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all metrics."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._file.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


class WandbWriter:
    """A run's dashboard on Weights & Biases."""

    def __init__(self, folder: Path, run: WandbRun) -> None:
        """Start or continue the run; its local files go to ``wandb/`` in `folder`, which need not exist.

        Raises:
            ConfigError: the extra is not installed, or the service does not accept the run. A new `folder` is removed.

        """
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"logger.wandb_enabled: the package wandb is not installed; {install_command('wandb')}"
            ) from error
        is_new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=run.project,
                name=run.name,
                id=run.run_id,
                resume="allow",
                dir=str(folder),
                config=run.config,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.Error, OSError, ValueError) as error:  # ValueError: an environment variable is invalid
            wandb.teardown()
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"logger.wandb_enabled: {' '.join(str(error).split())}") from error
        # wandb's own counter refuses to go back, as a run resumed from an older checkpoint does.
        self._run.define_metric("*", step_metric="step")

    def go_back_to(self, first_step: int) -> None:
        """Do nothing: the last of several rows with the same step counts."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Flush and end the run's session."""
        self._run.finish()


class MlflowWriter:
    """A run's dashboard on an MLflow server, or in MLflow's files."""

    _RUN_ID = "tandem.run_id"
    _MOST_METRICS, _MOST_PARAMETERS, _LONGEST_VALUE = 1000, 100, 6000
    """MLflow's limits per call."""

    def __init__(self, folder: Path, run: MlflowRun) -> None:
        """Start or continue the run; files, if it has any, are in ``mlflow/`` in `folder`.

        Raises:
            ConfigError: the extra is not installed, or the server cannot be reached or does not accept the run. A new
                `folder` is removed.

        """
        # The step should not wait for a server that is gone; MLflow's own timeout is minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise ConfigError(
                f"logger.mlflow_enabled: the package mlflow is not installed; {install_command('mlflow')}"
            ) from error
        self._metric, self._parameter = Metric, Param
        self._unsent: list[Any] = []
        self._where = run.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if self._where is None:
            self._where = (folder / "mlflow").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers a database
        is_new = not folder.exists()
        try:
            self._client = MlflowClient(tracking_uri=self._where)
            self._run_id = self._start(run)
        except (MlflowException, OSError) as error:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"logger.mlflow_enabled: {self._where}: {' '.join(str(error).split())}") from error

    def _start(self, run: MlflowRun) -> str:
        """Return MLflow's id of the run, creating the run if necessary."""
        client = self._client
        experiment = client.get_experiment_by_name(run.experiment)
        experiment_id = client.create_experiment(run.experiment) if experiment is None else experiment.experiment_id
        earlier_runs = client.search_runs([experiment_id], f"tags.`{self._RUN_ID}` = '{run.run_id}'", max_results=1)
        if earlier_runs:
            client.update_run(earlier_runs[0].info.run_id, status="RUNNING")
            return str(earlier_runs[0].info.run_id)
        mlflow_run = client.create_run(experiment_id, run_name=run.name, tags={self._RUN_ID: run.run_id})
        parameters = [
            self._parameter(_sanitise_name(key), str(value)[: self._LONGEST_VALUE]) for key, value in _flat(run.config)
        ]
        for first in range(0, len(parameters), self._MOST_PARAMETERS):
            client.log_batch(mlflow_run.info.run_id, params=parameters[first : first + self._MOST_PARAMETERS])
        return str(mlflow_run.info.run_id)

    def go_back_to(self, first_step: int) -> None:
        """Do nothing: the last of several values with the same step counts."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics; those that cannot be sent now go with the next step's."""
        now = int(time.time() * 1000)
        self._unsent += [self._metric(_sanitise_name(name), value, now, step) for name, value in metrics.items()]
        self._send()

    def _send(self) -> bool:
        try:
            while self._unsent:
                self._client.log_batch(self._run_id, metrics=self._unsent[: self._MOST_METRICS])
                del self._unsent[: self._MOST_METRICS]
        except Exception:  # the library raises whatever its stores raise
            return False
        return True

    def close(self) -> None:
        """Send the rest, and end the run's session."""
        is_whole = self._send()
        try:
            self._client.set_terminated(self._run_id)
        except Exception:  # likewise
            is_whole = False
        if not is_whole:
            print(f"logger.mlflow: the end of the run could not be sent to {self._where}", file=sys.stderr)


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, each with its path."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _sanitise_name(name: str) -> str:
    """Return a name without the characters that MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", name)


class MetricWriters:
    """All enabled dashboards as one; there may be none."""

    def __init__(self) -> None:
        self._writers: list[MetricWriter] = []

    def __len__(self) -> int:
        return len(self._writers)

    def add(self, writer: MetricWriter) -> None:
        """Write to this one as well from now on, and close it at the end."""
        self._writers.append(writer)

    def go_back_to(self, first_step: int) -> None:
        """Expect `first_step` and later steps to be written again."""
        for writer in self._writers:
            writer.go_back_to(first_step)

    def write(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Write a finished step, given by short names."""
        named = dashboard_names(metrics, seconds)
        for writer in self._writers:
            writer.write(step, named)

    def close(self) -> None:
        """Flush and close all."""
        while self._writers:
            self._writers.pop().close()
