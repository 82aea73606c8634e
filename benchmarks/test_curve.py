"""Encryption: what CURVE costs a trainer that fetches samples, beside the same sockets without it, in turns.

Weights go by shared memory, CUDA IPC, gloo or NCCL and never over ZeroMQ, so that the sample plane is where bytes are.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.measure import keep_ratios
from benchmarks.smoke import IS_SMOKE, sized
from tandem.common import curve
from tandem.common.curve import AdmittedKeys
from tandem.common.messages import MAX_TOKENS_FETCHED, SamplesFetched
from tandem.common.wire import encode
from tandem.common.wire.gatekeeper import Gatekeeper
from tandem.samples.batch import SampleBatch
from tests.harness.members import MEMBER

ROOT = Path(__file__).parents[1]
NUM_TOKENS = sized(MAX_TOKENS_FETCHED, 1000)
NUM_REPLIES, NUM_ROUNDS = sized(20, 2), 5
WAYS = ("plain", "encrypted")


def reply() -> list[Any]:
    """The largest reply that one request may have."""
    arrays = SampleBatch(
        lengths_S=np.array([NUM_TOKENS], dtype=np.int32),
        token_ids_T=np.arange(NUM_TOKENS, dtype=np.int32),
        loss_mask_T=np.ones(NUM_TOKENS, dtype=np.bool_),
        generation_logprobs_T=np.zeros(NUM_TOKENS, dtype=np.float32),
        versions_T=np.zeros(NUM_TOKENS, dtype=np.int32),
    )
    return encode(SamplesFetched(request_id=1), arrays.columns)


def serve() -> None:
    """Answer requests on two sockets until standard input ends; their ports and keys come first."""
    context, poller = zmq.Context(), zmq.Poller()
    Gatekeeper(context, AdmittedKeys([sys.argv[1]]))
    own = curve.new_key_pair()
    for way in WAYS:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        if way == "encrypted":
            curve.hear_processes(socket, own)
        print(socket.bind_to_random_port("tcp://127.0.0.1"))
        poller.register(socket, zmq.POLLIN)
    print(own.public, flush=True)
    poller.register(sys.stdin, zmq.POLLIN)
    frames = reply()
    while True:
        for socket, _ in poller.poll():
            if socket == sys.stdin.fileno():
                context.destroy(linger=0)
                return
            peer, *_ = socket.recv_multipart()
            socket.send_multipart([peer, *frames], copy=False)


def seconds(socket: zmq.Socket[bytes]) -> float:
    """Fetch one reply after the other."""
    begun = time.perf_counter()
    for _ in range(NUM_REPLIES):
        socket.send(b"more")
        assert len(socket.recv_multipart(copy=False)) == len(reply_frames)
    return time.perf_counter() - begun


reply_frames = reply()


def test_fetching_samples(benchmark: BenchmarkFixture) -> None:
    num_bytes = NUM_REPLIES * sum(len(frame) for frame in reply_frames)
    words = [sys.executable, "-m", "benchmarks.test_curve", MEMBER.public]
    with (
        subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        zmq.Context() as context,
    ):
        assert process.stdout is not None
        ports = {way: int(process.stdout.readline()) for way in WAYS}
        server = process.stdout.readline().strip()
        sockets = {}
        for way in WAYS:
            sockets[way] = context.socket(zmq.DEALER)
            if way == "encrypted":
                curve.prove(sockets[way], MEMBER, server)
            sockets[way].connect(f"tcp://127.0.0.1:{ports[way]}")
            seconds(sockets[way])
        rounds: list[dict[str, float]] = []
        benchmark.pedantic(
            lambda: rounds.append({way: seconds(socket) for way, socket in sockets.items()}), rounds=NUM_ROUNDS
        )
        for socket in sockets.values():
            socket.close(linger=0)
        process.communicate("")
    rates = {way: num_bytes / statistics.median(each[way] for each in rounds) / 1e9 for way in WAYS}
    benchmark.extra_info.update({f"{way}: GB/s": round(rate, 3) for way, rate in rates.items()})
    keep_ratios(benchmark, "rate, share of plain", {"encrypted": rates["encrypted"] / rates["plain"]})
    tokens = {way: NUM_REPLIES * NUM_TOKENS / num_bytes * rate * 1e9 for way, rate in rates.items()}
    print(f"\nGB/s: {rates}; tokens a second from one rollout: {tokens}")
    assert IS_SMOKE or tokens["encrypted"] > 1e6, "an engine makes some tens of thousands a second"


if __name__ == "__main__":
    serve()
