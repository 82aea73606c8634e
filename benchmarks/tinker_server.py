"""The server of the Tinker API that is measured: one trainer and one engine, each of one thread."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from typing import Any

from smoke import sized

LENGTH = sized(256, 16)
"""Tokens of the longest sequence."""
TIMEOUT_S = 240.0
CONFIG: dict[str, Any] = {
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": "0123456789:= ",
            "config": {
                "model_type": "qwen3",
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": LENGTH,
        "train_micro_batch_size": 8,
        "generation": {"transformers_cfg": {"num_slots": 16}},
    },
    "cluster": {"trainers": 1, "rollouts": 1, "launch": {"refit": True}, "threads_per_process": 1},
    "logger": {"log_dir": "run", "page": "off", "tensorboard_enabled": False},
}


def await_server(port: int, served: subprocess.Popen[str]) -> None:
    """Wait until the server listens."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and served.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise AssertionError(f"the server does not listen on port {port}: {served.poll()}")
