"""What does it cost two clients of the Tinker API to sample from two models, beside as many samples of one model?

The same server with ``--models 2`` twice: its engine holds the adapters of both models, or those of one at a time,
merged into the weights, as engines of vLLM do. In each, one client asks for samples one by one, two clients ask in
turns, and two ask at once for several at a time. What is compared is measured in turns, and ratios are medians of those
of a round.

The SDK has to be installed, as for ``benchmarks/test_tinker.py``.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from tinker_server import CONFIG, TIMEOUT_S, await_server

RANK, PROMPT = 8, [4, 5, 6, 7]
NUM_ONE_BY_ONE, NUM_NEW = sized((6, 16), (2, 2))
NUM_BUSY, NUM_AT_ONCE = sized((3, 8), (1, 2))
NUM_ROUNDS = sized(7, 1)
WAYS = {"held together": {}, "merged in turns": {"adapter_sets": 1}}


def trained(url: str) -> Iterator[tuple[Any, Any]]:
    """Yield two clients, each with what samples from a model that it has trained by a step."""
    import numpy as np
    import tinker
    from tinker import types

    for seed in range(2):
        service = tinker.ServiceClient(base_url=url)
        training = service.create_lora_training_client("model", rank=RANK).result()
        token_ids = np.random.default_rng(seed).integers(3, 14, 16)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(token_ids[:-1].tolist()),
            loss_fn_inputs={"target_tokens": token_ids[1:].astype(np.int64)},
        )
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        yield service, training.save_weights_and_get_sampling_client().result()


def ask(url: str) -> dict[str, list[float]]:
    """Be the clients: sample from two models, and return seconds a round."""
    from tinker import types

    services, samplers = zip(*trained(url), strict=True)
    prompt = types.ModelInput.from_ints(PROMPT)

    def sample(model: int, seed: int, count: int) -> None:
        params = types.SamplingParams(max_tokens=NUM_NEW, seed=seed, stop=[])
        samplers[model].sample(prompt, count, params).result()

    def in_turns(*models: int) -> None:
        for seed in range(NUM_ONE_BY_ONE):
            for model in models:
                sample(model, seed, 1)

    def at_once(*models: int) -> None:
        def work(model: int) -> None:
            for seed in range(NUM_BUSY):
                sample(model, seed, NUM_AT_ONCE)

        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ways: dict[str, Callable[[], None]] = {
        "one model, one by one": lambda: in_turns(0, 0),
        "two models in turns": lambda: in_turns(0, 1),
        "one model at once, twice": lambda: at_once(0, 0),
        "two models at once": lambda: at_once(0, 1),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + NUM_ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:  # the first round warms up
                found[name].append(time.perf_counter() - began)
    for service in services:
        service.close("success").result()
    return found


def measured(folder: Path, engine: dict[str, int]) -> dict[str, list[float]]:
    """Serve and ask; return seconds a round."""
    folder.mkdir()
    config = copy.deepcopy(CONFIG)
    config["policy"]["dtensor_cfg"] = {"lora_cfg": {"enabled": True, "dim": RANK}}
    config["policy"]["generation"]["transformers_cfg"] |= engine
    del config["cluster"]["launch"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = Path(sys.executable).parent / "coordinator"
    key = subprocess.run(
        [command, "tinker", "keys", "me"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    words = [command, "tinker", "config.yaml", "--port", str(port), "--models", "2"]
    with subprocess.Popen(words, cwd=folder, text=True) as served:
        try:
            await_server(port, served)
            environment = {**os.environ, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}
            client = [sys.executable, __file__, f"http://127.0.0.1:{port}"]
            done = subprocess.run(
                client, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
            )
            served.send_signal(signal.SIGINT)
            assert served.wait(TIMEOUT_S) == 0
        finally:
            served.kill()
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="the SDK of Tinker is not installed")
@pytest.mark.long(minutes=1)
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_samples_of_two_models(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    found = benchmark.pedantic(
        lambda: {way: measured(tmp_path / way.replace(" ", "_"), engine) for way, engine in WAYS.items()}, rounds=1
    )
    benchmark.extra_info.update({"seconds": found, "load average of the machine": os.getloadavg()})
    for what, alone in (
        ("two models in turns", "one model, one by one"),
        ("two models at once", "one model at once, twice"),
    ):
        ratios = {
            way: statistics.median(two / one for two, one in zip(each[what], each[alone], strict=True))
            for way, each in found.items()
        }
        keep_ratios(benchmark, f"{what}: seconds, share of those of as many of one (at most)", ratios, aim=1.1)
        for way, ratio in ratios.items():
            medians = [1e3 * statistics.median(found[way][each]) for each in (what, alone)]
            print(f"\n{what}, {way}: {medians[0]:.0f} ms, and {medians[1]:.0f} ms for {alone}: {ratio:.2f}")


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1])), flush=True)
