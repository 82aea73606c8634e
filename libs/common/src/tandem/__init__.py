"""The Python interface: ``tandem.train`` starts a run, ``tandem.load_run`` opens an existing one.

In a clone, the packages of the namespace lie in several folders, one for each library and service. Each name here is
imported on first use, so ``import tandem`` costs nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__path__ = __import__("pkgutil").extend_path(__path__, __name__)  # the form that static tools recognise

if TYPE_CHECKING:
    from tandem.common.errors import ConfigError as ConfigError
    from tandem.common.errors import DataError as DataError
    from tandem.common.errors import RunFolderError as RunFolderError
    from tandem.common.errors import ServiceError as ServiceError
    from tandem.common.errors import TandemError as TandemError
    from tandem.config import Config as Config
    from tandem.coordinator.api.callbacks import Callback as Callback
    from tandem.coordinator.api.handle import Run as Run
    from tandem.coordinator.api.handle import load_run as load_run
    from tandem.coordinator.api.training import train as train
    from tandem.observe.run_folder.journal import StepRecord as StepRecord
    from tandem.samples.recorded_shards import Sample as Sample

    __version__: str

_WHERE = {
    "Callback": "tandem.coordinator.api.callbacks",
    "Config": "tandem.config",
    "ConfigError": "tandem.common.errors",
    "DataError": "tandem.common.errors",
    "Run": "tandem.coordinator.api.handle",
    "RunFolderError": "tandem.common.errors",
    "Sample": "tandem.samples.recorded_shards",
    "ServiceError": "tandem.common.errors",
    "StepRecord": "tandem.observe.run_folder.journal",
    "TandemError": "tandem.common.errors",
    "load_run": "tandem.coordinator.api.handle",
    "train": "tandem.coordinator.api.training",
}
"""The public names and the modules that define them."""
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from tandem.common.distribution import version

        return version()
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, "__version__"})
