"""Metrics to where people look at them: TensorBoard, and Weights & Biases where it is enabled. No torch here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.common.config import Config, to_plain
from tandem.common.errors import ConfigError


class MetricWriters:
    """Writes a step's metrics under NeMo-RL's prefixes: ``train/``, ``validation/`` and ``timing/train/``."""

    def __init__(self, config: Config) -> None:
        """Open what ``logger`` enables. Raises `ConfigError` if wandb is enabled and not installed."""
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.logger.tensorboard_enabled:
            self._tensorboard = _tensorboard(Path(config.logger.log_dir) / config.logger.tensorboard.log_dir)
        if config.logger.wandb_enabled:
            self._wandb = _wandb(config)

    def write(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Write one step."""
        scalars = {_prefixed(name): value for name, value in metrics.items()}
        scalars |= {f"timing/train/{_TIMINGS.get(name, name)}": value for name, value in seconds.items()}
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        """Flush and close."""
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


_TIMINGS = {"total": "total_step_time"}


def _prefixed(name: str) -> str:
    return f"validation/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}"


class _EventFile:
    """TensorBoard's own event writer; torch's wrapper around it would import torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _tensorboard(folder: Path) -> _EventFile:
    folder.mkdir(parents=True, exist_ok=True)
    return _EventFile(folder)


def _wandb(config: Config) -> Any:
    with contextlib.suppress(ImportError):
        import wandb

        settings = config.logger.wandb
        return wandb.init(
            project=settings.project, name=settings.name, dir=config.logger.log_dir, config=to_plain(config)
        )
    raise ConfigError("logger.wandb_enabled: wandb is not installed; pip install 'tandem[wandb]'")
