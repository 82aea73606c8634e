"""What a test of checkpoints holds them to."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def no_pickle() -> Iterator[None]:
    """Fail whatever pickles or unpickles."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something is pickled or unpickled")

    names = ("dump", "dumps", "load", "loads", "Pickler", "Unpickler", "_Pickler", "_Unpickler")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(pickle, name, refuse)
        patch.setattr(torch, "load", refuse)
        patch.setattr(torch, "save", refuse)
        patch.setattr(torch.distributed.distributed_c10d, "_unpickler", refuse)
        patch.setattr(torch.distributed.distributed_c10d, "_pickler", refuse)
        yield
