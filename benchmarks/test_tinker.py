"""What does the Tinker API add to a gradient and to samples that a client asks for by the SDK?

A server with one trainer and one engine, each of one thread, whose processes are as any run's are but for stop-watches:
around what the trainer does for a gradient, from its table to its loss, and from the first step of the engine to the
last: between them it does what it does in any run. All else between a client's call and its answer is overhead: the
SDK, HTTP, the coordinator, and the wire to the processes. The goal is 10 ms and 5 % at most.

The SDK has to be installed: ``tox -e tinker --notest``, and then ``.tox/venv/bin/python -m pytest --long`` with this
file and ``PYTHONPATH=$(echo $PWD/.tox/tinker/lib/*/site-packages)``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from stop_watches import WATCHED, noted, spans_in
from tinker_server import CONFIG, LENGTH, TIMEOUT_S, await_server

from tandem.common.keys import write_run_keys
from tandem.launch.admission import new_run_keys

NUM_ROWS = sized(32, 2)
NUM_SAMPLES, NUM_NEW = sized((16, 64), (2, 4))
NUM_ROUNDS = sized(12, 2)
NUM_WARMING = 2
Spans = list[tuple[float, float]]


def watched(kind: str) -> int:
    """Be the command of a process, and note when its model begins and ends its work."""
    if kind == "trainer":
        from tandem.trainer import cli as trainer
        from tandem.trainer.calls.calls import RankCalls

        RankCalls.handle = noted(RankCalls.handle)  # type: ignore[method-assign]
        return trainer.main(sys.argv[2:])
    from tandem.rollout import cli as rollout
    from tandem.rollout.engines.transformers import TransformersEngine

    TransformersEngine.step = noted(TransformersEngine.step)  # type: ignore[method-assign]
    return rollout.main(sys.argv[2:])


def ask(url: str) -> dict[str, Spans]:
    """Be a client: ask for gradients and samples; return when each call began and was answered."""
    import numpy as np
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client("model", rank=0).result()
    rng = np.random.default_rng(0)
    data = []
    for _ in range(NUM_ROWS):
        token_ids = rng.integers(3, 14, LENGTH)
        inputs = {
            "target_tokens": token_ids[1:].astype(np.int64),
            "logprobs": np.full(LENGTH - 1, -2.5, dtype=np.float32),
            "advantages": rng.standard_normal(LENGTH - 1).astype(np.float32),
        }
        model_input = types.ModelInput.from_ints(token_ids[:-1].tolist())
        data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(rng.integers(3, 14, 8).tolist())
    params = types.SamplingParams(max_tokens=NUM_NEW, seed=1, stop=[])
    ways: dict[str, Callable[[], Any]] = {
        "forward_backward": lambda: training.forward_backward(data, "importance_sampling").result(),
        "sample": lambda: sampling.sample(prompt, NUM_SAMPLES, params).result(),
    }
    spans: dict[str, Spans] = {name: [] for name in ways}
    for _ in range(NUM_WARMING + NUM_ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            spans[name].append((began, time.perf_counter()))
    service.close("success")
    return {name: each[NUM_WARMING:] for name, each in spans.items()}


def measured(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Serve, and ask; return the seconds of each call, and those of them in which the model worked."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as free_too:
        address, port = f"tcp://127.0.0.1:{free.getsockname()[1]}", free_too.getsockname()[1]
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"cluster": CONFIG["cluster"] | {"address": address}}))
    key_file = write_run_keys(folder / "run", new_run_keys())
    command = Path(sys.executable).parent / "coordinator"
    key = subprocess.run(
        [command, "tinker", "keys", "me"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    environment = {**os.environ, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}
    with contextlib.ExitStack() as stack:

        def start(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
            process = stack.enter_context(subprocess.Popen(words, cwd=folder, text=True, **options))
            stack.callback(process.kill)
            return process

        served = start(command, "tinker", "config.yaml", "--port", str(port))
        for kind in ("trainer", "rollout"):
            words = [sys.executable, __file__, kind, "--coordinator", address, "--key-file", key_file]
            start(*words, env={**os.environ, WATCHED: str(folder / kind)})
        await_server(port, served)
        client = start(
            sys.executable, __file__, "ask", f"http://127.0.0.1:{port}", env=environment, stdout=subprocess.PIPE
        )
        text, _ = client.communicate(timeout=TIMEOUT_S)
        assert client.returncode == 0
        served.send_signal(signal.SIGINT)
        assert served.wait(TIMEOUT_S) == 0
    spans: dict[str, Spans] = json.loads(text.splitlines()[-1])
    found = {}
    for name, kind in (("forward_backward", "trainer"), ("sample", "rollout")):
        worked = spans_in(folder / kind)
        inside = []
        for asked, answered in spans[name]:
            its = [(began, ended) for began, ended in worked if asked <= began and ended <= answered]
            inside.append(its[-1][1] - its[0][0])
        found[name] = ([answered - asked for asked, answered in spans[name]], inside)
    return found


@pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="the SDK of Tinker is not installed")
@pytest.mark.long(minutes=1)
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_overhead_of_calls(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    found = benchmark.pedantic(measured, args=(tmp_path,), rounds=1)
    sizes = {
        "forward_backward: sequences x tokens": [NUM_ROWS, LENGTH],
        "sample: samples x new tokens": [NUM_SAMPLES, NUM_NEW],
    }
    benchmark.extra_info.update({**sizes, "load average of the machine": os.getloadavg()})
    for name, (seconds, inside) in found.items():
        assert min(inside) > 0.0, "the model has worked in each"
        overhead = [whole - its for whole, its in zip(seconds, inside, strict=True)]
        shares = [added / its for added, its in zip(overhead, inside, strict=True)]
        benchmark.extra_info[name] = {
            "seconds": seconds,
            "seconds of the model": inside,
            "milliseconds of all else, median": 1e3 * statistics.median(overhead),
            "all else, share of the model's, median": statistics.median(shares),
        }
        keep_ratios(
            benchmark,
            f"{name}: seconds of all else, share of the model's (at most)",
            {"tandem": statistics.median(shares)},
            aim=0.05,
        )
        print(f"\n{name}: {1e3 * statistics.median(inside):.1f} ms of the model, and of everything else")
        print(f"{1e3 * statistics.median(overhead):.1f} ms: {statistics.median(shares):.2%} more")


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        print(json.dumps(ask(sys.argv[2])), flush=True)
    else:
        sys.exit(watched(sys.argv[1]))
