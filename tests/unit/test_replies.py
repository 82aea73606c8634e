"""What members say is checked, not believed: well-formed messages with wrong content, through real sockets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from plan_harness import simple

from tandem.common.curve import new_key_pair
from tandem.common.errors import WireError
from tandem.common.messages import (
    PROTOCOL_VERSION,
    AnyCommand,
    BuildEngine,
    BuildTrainer,
    CommitVersion,
    ConnectTransferGroup,
    CopyWeights,
    DigestsReported,
    EngineBuilt,
    Evaluate,
    Evaluated,
    Failed,
    Generate,
    Generated,
    Heartbeat,
    Hello,
    InstallProgram,
    MemoryUse,
    Message,
    OpenRendezvous,
    PlannedTransferGroup,
    PlanTransfers,
    Problem,
    ProgramInstalled,
    PromptGroup,
    Refit,
    Refitted,
    RendezvousOpened,
    ReportDigests,
    SampleScored,
    SamplesFinished,
    SamplesMissing,
    SamplingParameters,
    ServiceKind,
    Shutdown,
    Train,
    Trained,
    TrainerBuilt,
    TransferGroupConnected,
    TransfersPlanned,
    VersionCommitted,
    WeightsCopied,
)
from tandem.common.wire import Frames, encode
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.processes.replies import Replies, SampleLimits
from tandem.coordinator.scheduler.events import CommandErred, Event, ProcessJoined, ProcessLost, ProcessReplied
from tandem.launch.admission import HeartbeatSettings, ListeningSocket
from tandem.refit import layout
from tests.harness.members import at, dealer_to, open_listening

LIMITS = SampleLimits(vocabulary=50, max_tokens=12, max_turns=2)
LAYOUT = layout.encode(simple({"a": ((2, 3), "float32"), "b": ((4,), "float32")}))
MEMORY = MemoryUse(peak=10, held=5)
PROMPTS = {4: (1, 5, 7), 6: (1, 9)}
VERSION, STEP = 3, 4
SOURCES = {"rollout-0": at("tcp://10.0.0.1:4711")}


def command(command_id: int) -> dict[str, Any]:
    return {"command_id": command_id, "deadline_s": 60.0}


GENERATE = Generate(
    **command(13),
    cancel_before=13,
    step=STEP,
    purpose="train",
    sampling=SamplingParameters(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=4, stop_token_ids=(2,), stop_strings=()
    ),
    groups=tuple(
        PromptGroup(
            group=group,
            problem=Problem(problem_id=f"p{group}", question="", answer="", metadata={}),
            prompt_ids=prompt_ids,
            seeds=(7, 2**64 - 1),
        )
        for group, prompt_ids in PROMPTS.items()
    ),
)


def sample(group: int, number: int, made: int, turns: int = 1) -> SampleScored:
    return SampleScored(
        group=group,
        sample=number,
        prompt_length=len(PROMPTS[group]),
        response_length=made,
        num_tokens=len(PROMPTS[group]) + made + (2 if turns == 2 else 0),
        oldest_version=VERSION,
        newest_version=VERSION,
        tokens_by_version=(made,),
        num_turns=turns,
        finish_reason="stop",
        reward=0.5,
        components={"format": 0.25},
        correct=False,
        response="",
    )


SAMPLES = (sample(4, 0, 2), sample(6, 1, 3), sample(6, 0, 4, turns=2), sample(4, 1, 1))
FINISHED = SamplesFinished(command_id=13, step=STEP, purpose="train", samples=SAMPLES)
GENERATED = Generated(
    command_id=13, step=STEP, purpose="train", num_samples=4, num_tokens=10, seconds={"rewards": 0.5}, memory=MEMORY
)
BUILT = EngineBuilt(command_id=10, layouts=(LAYOUT,), samples_at=at("tcp://10.0.0.1:4711"))
TRAINED = Trained(
    command_id=23,
    step=STEP,
    version=STEP,
    metrics={"loss": 0.5, "reward/a": -1.0},
    seconds={"policy_training": 1.0},
    compute_s=0.75,
    waited_s=0.25,
    has_update=True,
    memory=MEMORY,
)
REFITTED = Refitted(command_id=11, version=VERSION, num_bytes={"trainer-0>rollout-0": 40}, seconds=0.1, memory=MEMORY)
DIGESTED = DigestsReported(command_id=12, version=VERSION, digests=(bytes(16),), seconds=0.1)
COPIED = WeightsCopied(command_id=25, version=VERSION, digests=(bytes(16),))
PLANNED = TransfersPlanned(
    command_id=31,
    programs={"trainer-0": b"p", "rollout-0/0": b"q", "rollout-0/1": b"r"},
    senders=("trainer-0",),
    transfer_groups=(PlannedTransferGroup(name="to rollout-0", members=("trainer-0", "rollout-0/0", "rollout-0/1")),),
    num_bytes={"trainer-0>rollout-0/0": 40, "rollout-0/0>rollout-0/1": 40},
    predicted_s=0.1,
    bound_s=0.05,
    seconds=0.2,
)

Exchange = tuple[AnyCommand, tuple[tuple[Message, Mapping[str, Any]], ...]]
"""A command and its whole answer."""
EXCHANGES: dict[ServiceKind, list[Exchange]] = {
    "rollout": [
        (BuildEngine(**command(10)), ((BUILT, {}),)),
        (Refit(**command(11), version=VERSION), ((REFITTED, {}),)),
        (ReportDigests(**command(12), version=VERSION), ((DIGESTED, {}),)),
        (GENERATE, ((FINISHED, {}), (GENERATED, {}))),
        (
            InstallProgram(**command(14), programs=(b"p",)),
            ((ProgramInstalled(command_id=14, num_copies=2, num_bytes=40), {}),),
        ),
        (
            ConnectTransferGroup(
                **command(15),
                transfer_group="to rollout-0",
                members=("a",),
                epoch=0,
                rendezvous_host="h",
                rendezvous_port=1,
            ),
            ((TransferGroupConnected(command_id=15, transfer_group="to rollout-0"), {}),),
        ),
    ],
    "trainer": [
        (OpenRendezvous(**command(21)), ((RendezvousOpened(command_id=21, host="here", port=4711), {}),)),
        (
            BuildTrainer(**command(22), rendezvous_host="here", rendezvous_port=4711, world_size=1, version=2),
            ((TrainerBuilt(command_id=22, version=2, num_parameters=10, shares_prompts=True, layout=LAYOUT), {}),),
        ),
        (Train(**command(23), step=STEP, sources=SOURCES), ((TRAINED, {}),)),
        (
            Evaluate(**command(24), step=STEP, sources={}, parts={}),
            ((Evaluated(command_id=24, step=STEP, metrics={"loss": 0.25}), {}),),
        ),
        (CopyWeights(**command(25), version=VERSION, with_digests=True), ((COPIED, {}),)),
    ],
    "refit": [
        (
            PlanTransfers(
                **command(31),
                sources={"trainer-0": LAYOUT},
                destinations={"rollout-0/0": LAYOUT, "rollout-0/1": LAYOUT},
                allow_alias=False,
            ),
            ((PLANNED, {}),),
        ),
        (
            CommitVersion(
                **command(32),
                version=VERSION,
                digests={"trainer-0": bytes(16), "rollout-0/0": bytes(16), "rollout-0/1": bytes(16)},
                has_update=True,
            ),
            ((VersionCommitted(command_id=32, version=VERSION, differing={"rollout-0": "a"}, digest=5), {}),),
        ),
    ],
}


_PEERS: list[Peer] = []


class Room:
    """A coordinator's registry, and one member on a socket of its own, which may send anything."""

    def __init__(self, hub: ListeningSocket, kind: ServiceKind, index: int = 0) -> None:
        heartbeat = HeartbeatSettings(interval_s=100.0, timeout_s=100.0)
        self.registry = ProcessRegistry(hub, {kind: index + 1}, b"{}", "run", heartbeat, Replies(LIMITS))
        self.members = [Peer(self.registry) for _ in range(index + 1)]
        for number, process in enumerate(self.members):
            process.send(encode(Hello(protocol_version=PROTOCOL_VERSION, service=kind, host="here", pid=1)))
            event = self.next()
            assert isinstance(event, ProcessJoined)
            assert event.process == f"{kind}-{number}"
        self.name = f"{kind}-{index}"

    def next(self) -> Event:
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            for event in self.registry.receive(0.1):
                return event
        raise AssertionError("nothing happened within 10 s")

    def command(self, command: AnyCommand) -> None:
        self.registry.command(self.name, command, encode(command))

    def say(self, frames: Frames) -> Event:
        """Have the member send something; return what it is to the coordinator."""
        self.members[-1].send(frames)
        return self.next()

    def talk(self, kind: ServiceKind, until: type[Message], before: int = 0) -> None:
        """Exchange commands and answers, up to the answer of a type, which is not sent."""
        for command, answers in EXCHANGES[kind]:
            self.command(command)
            for answer, came in answers:
                if type(answer) is until:
                    return
                event = self.say(encode(answer, came))
                assert isinstance(event, ProcessReplied), event
        raise AssertionError(f"no {until.__name__}")


class Peer:
    """A socket such as a process has; closed after the test."""

    def __init__(self, registry: ProcessRegistry) -> None:
        own = new_key_pair()
        registry.names.register(own.public)
        self._context, self._socket = dealer_to(registry.address, own)
        _PEERS.append(self)

    def send(self, frames: Frames) -> None:
        self._socket.send_multipart(frames)

    def told(self) -> list[bytes]:
        """Return the headers of what it has been sent, until nothing more comes."""
        found = []
        while self._socket.poll(200):
            found.append(self._socket.recv_multipart()[0])
        return found

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture(scope="module")
def hub() -> Iterator[ListeningSocket]:
    listening = open_listening()
    yield listening
    listening.hub.close()


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    yield
    while _PEERS:
        _PEERS.pop().close()


Tampering = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes a message, as plain values, or the arrays that come with it."""


def tampered(message: Message, came: Mapping[str, Any], tamper: Tampering) -> Frames:
    """Return the frames of a message that somebody has changed on its way, as they would be encoded."""
    plain = msgspec.msgpack.decode(encode(message)[0])
    changed = {name: array.copy() for name, array in came.items()}
    tamper(plain, changed)
    return [msgspec.msgpack.encode(plain), *encode(message, changed)[1:]]


def answer(kind: ServiceKind, message: type[Message]) -> tuple[Message, Mapping[str, Any]]:
    return next(a for _, answers in EXCHANGES[kind] for a in answers if type(a[0]) is message)


@pytest.mark.parametrize("kind", EXCHANGES)
def test_what_is_right_is_accepted_and_what_is_over_is_dropped(hub: ListeningSocket, kind: ServiceKind) -> None:
    room = Room(hub, kind)
    for command, answers in EXCHANGES[kind]:
        room.command(command)
        for message, came in answers:
            event = room.say(encode(message, came))
            assert isinstance(event, ProcessReplied)
            assert event.reply == message
    for _, answers in EXCHANGES[kind]:
        for message, came in answers:  # once more, as after a command that was sent twice
            room.members[-1].send(encode(message, came))
    event = room.say([b"junk"])
    assert isinstance(event, ProcessLost), "nothing of it is an event"


def say(field: str, value: object) -> Tampering:
    """Change a field of the message; `a.0.b` is a field of what is first in another."""

    def tamper(message: dict[str, Any], _: dict[str, Any]) -> None:
        *path, last = field.split(".")
        place: Any = message
        for step in path:
            place = place[int(step) if step.isdigit() else step]
        place[int(last) if last.isdigit() else last] = value

    return tamper


def one_more(_: dict[str, Any], came: dict[str, Any]) -> None:
    came["more"] = np.zeros(3)


NAN, INF = float("nan"), float("inf")
SENT: dict[str, tuple[Tampering, str]] = {
    "arrays": (one_more, "more: arrays came with a message that has none"),
    "too long": (say("samples.1.num_tokens", 13), r"samples\[1\].num_tokens: 13, must be at most 12"),
    "too short": (say("samples.1.num_tokens", 4), r"samples\[1\].num_tokens: 4, must be that of the prompt, 2, .*"),
    "no tokens": (say("samples.1.num_tokens", 0), r"samples\[1\].num_tokens: Expected `int` >= 1"),
    "version to come": (
        say("samples.0.newest_version", 4),
        r".*newest_version: 4, must be one that the .* held then: 3",
    ),
    "version long gone": (say("samples.0.oldest_version", 2), r".*oldest_version: 2, must be one that .* held then: 3"),
    "negative version": (say("samples.0.oldest_version", -1), r"samples\[0\].oldest_version: Expected `int` >= 0"),
    "other tokens by version": (
        say("samples.0.tokens_by_version", [3]),
        r".*tokens_by_version: \(3,\), must be those of the response, 2, by version",
    ),
    "more versions than there are": (
        say("samples.0.tokens_by_version", [1, 1]),
        r".*tokens_by_version: \(1, 1\), must be those of the response, 2, by version",
    ),
    "text": (say("samples.0.response", "12"), r"samples\[0\].response: 12, must be empty: only validation has text"),
    "response of -5": (say("samples.0.response_length", -5), r"samples\[0\].response_length: Expected `int` >= 0"),
    "response of 10^9": (say("samples.0.response_length", 10**9), r"samples\[0\].response_length: 1000000000, must .*"),
    "prompt's length": (say("samples.0.prompt_length", 2), r"samples\[0\].prompt_length: 2, must be 3, as asked for"),
    "no turn": (say("samples.0.num_turns", 0), r"samples\[0\].num_turns: 0, must be at least 1"),
    "too many turns": (say("samples.0.num_turns", 3), r"samples\[0\].num_turns: 3, must be at most 2"),
    "turns without tokens": (say("samples.3.num_turns", 2), r"samples\[3\].response_length: 1, must be from 2 to .*"),
    "no such end": (say("samples.0.finish_reason", "tired"), r"samples\[0\].finish_reason: Invalid enum value .*"),
    "turns are left": (
        say("samples.0.finish_reason", "turns"),
        r"samples\[0\].finish_reason: turns, must be .*",
    ),
    "nobody's group": (say("samples.0.group", 5), r"samples\[0\].group: 5, must be one that was asked for"),
    "one sample more": (say("samples.0.sample", 2), r"samples\[0\].sample: 2, must be below 2"),
    "a sample twice": (say("samples.3.sample", 0), r"samples\[3\].sample: 0, must be in the message once"),
    "no sample": (say("samples", []), "samples: Expected `array` of length >= 1"),
    "reward": (say("samples.1.reward", NAN), r"samples\[1\].reward: Expected `float` >= .*"),
    "component": (say("samples.1.components.format", INF), r"samples\[1\].components\[...\]: Expected `float` <= .*"),
    "long name": (say("samples.1.components", {"x" * 201: 0}), r"samples\[1\].components: for a key: Expected .*"),
    "many names": (say("samples.1.components", dict.fromkeys(map(str, range(101)), 0)), ".*: .* of length <= 100"),
    "another step": (say("step", 5), "step: 5, must be 4, as in the command"),
    "another purpose": (say("purpose", "validate"), "purpose: validate, must be train, as in the command"),
    "nobody's command": (say("command_id", 99), "command_id: 99, must be of a command"),
    "another command": (
        say("command_id", 14),
        "command_id: 14, must be of a Generate or a RestoreSamples, not of a InstallProgram",
    ),
}
"""How samples are tampered with, and what is then said of them."""


@pytest.mark.parametrize(("tamper", "what"), SENT.values(), ids=SENT)
def test_samples_that_cannot_be_are_one_line(hub: ListeningSocket, tamper: Tampering, what: str) -> None:
    room = Room(hub, "rollout")
    room.talk("rollout", SamplesFinished)
    room.command(InstallProgram(**command(14), programs=(b"p",)))
    event = room.say(tampered(FINISHED, {}, tamper))
    assert isinstance(event, ProcessLost)
    assert event.process == "rollout-0"
    assert re.fullmatch(rf"it broke the protocol: SamplesFinished\.{what}", event.reason), event.reason


def as_long_as(count: int) -> dict[str, float]:
    return {f"metric {i}": 0.0 for i in range(count)}


SAID: list[tuple[ServiceKind, type[Message], Tampering, str]] = [
    (
        "rollout",
        EngineBuilt,
        say("samples_at.address", "ipc:///tmp/a"),
        "samples_at.address: .*, must be tcp://HOST:PORT",
    ),
    (
        "rollout",
        EngineBuilt,
        say("samples_at.address", "tcp://a b:1"),
        "samples_at.address: .*, must be tcp://HOST:PORT",
    ),
    ("rollout", EngineBuilt, say("layouts", []), "layouts: Expected `array` of length >= 1"),
    ("rollout", EngineBuilt, say("layouts.0", b"junk"), r"layouts\[0\]: not a layout: .*"),
    ("rollout", EngineBuilt, say("layouts.0", b"\x91" * 100_000), r"layouts\[0\]: not a layout: .*"),
    ("rollout", Refitted, say("version", 4), "version: 4, must be 3, as in the command"),
    ("rollout", Refitted, say("num_bytes", {"trainer-0>rollout-1": 3}), "num_bytes: .*, must be a link of rollout-0"),
    ("rollout", Refitted, say("num_bytes", {"trainer-0>rollout-0": -3}), r"num_bytes\[...\]: Expected `int` >= 0"),
    ("rollout", Refitted, say("seconds", NAN), "seconds: Expected `float` >= 0.0"),
    ("rollout", Refitted, say("memory.peak", -1), "memory.peak: Expected `int` >= 0"),
    ("rollout", DigestsReported, say("digests.0", bytes(8)), "digests: 8 bytes, must be 16: 8 for each tensor .*"),
    ("rollout", DigestsReported, say("digests", [bytes(16)] * 2), "digests: 16, 16 bytes, must be 16: .*"),
    ("rollout", DigestsReported, say("version", 2), "version: 2, must be 3, as in the command"),
    ("rollout", Generated, say("num_samples", 3), "num_samples: 3, must be 4, as asked for"),
    ("rollout", Generated, say("num_tokens", 11), "num_tokens: 11, must be 10, as were sent"),
    ("rollout", Generated, say("seconds.rewards", -1.0), r"seconds\[...\]: Expected `float` >= 0.0"),
    ("rollout", Generated, say("step", 5), "step: 5, must be 4, as in the command"),
    ("rollout", Generated, one_more, "more: arrays came with a message that has none"),
    (
        "rollout",
        TransferGroupConnected,
        say("transfer_group", "other"),
        "transfer_group: other, must be to rollout-0, as in the command",
    ),
    ("rollout", ProgramInstalled, say("num_bytes", -1), "num_bytes: Expected `int` >= 0"),
    ("trainer", RendezvousOpened, say("port", 0), "port: Expected `int` >= 1"),
    ("trainer", RendezvousOpened, say("port", 65536), "port: Expected `int` <= 65535"),
    ("trainer", RendezvousOpened, say("host", ""), "host: Expected `str` of length >= 1"),
    ("trainer", TrainerBuilt, say("layout", b"junk"), "layout: not a layout: .*"),
    ("trainer", TrainerBuilt, say("version", 0), "version: 0, must be 2, as in the command"),
    ("trainer", TrainerBuilt, say("num_parameters", 0), "num_parameters: Expected `int` >= 1"),
    ("trainer", Trained, say("metrics.loss", NAN), r"metrics\['loss'\]: nan, must be a finite number"),
    ("trainer", Trained, say("metrics.loss", INF), r"metrics\['loss'\]: inf, must be a finite number"),
    ("trainer", Trained, say("metrics", as_long_as(10**6)), "metrics: Expected `object` of length <= 1000"),
    ("trainer", Trained, say("metrics", {"x" * 201: 1.0}), "metrics: for a key: Expected `str` of length <= 200"),
    ("trainer", Trained, say("gpus", {"power_w": NAN}), r"gpus\['power_w'\]: nan, must be a finite number"),
    ("trainer", Trained, say("gpus", {"reward": 1.0}), "gpus: reward, must be one of used_gb, .*"),
    ("rollout", Generated, say("gpus", {"power_w": INF}), r"gpus\['power_w'\]: inf, must be a finite number"),
    ("trainer", Trained, say("seconds.policy_training", -1), r"seconds\[...\]: Expected `float` >= 0.0"),
    ("trainer", Trained, say("step", 5), "step: 5, must be 4, as in the command"),
    ("trainer", Trained, say("version", 5), "version: 5, must be the step, 4"),
    ("trainer", Trained, say("surprise", 5), ".*unknown field `surprise`"),
    ("trainer", Evaluated, say("metrics.loss", NAN), r"metrics\['loss'\]: nan, must be a finite number"),
    ("trainer", Evaluated, say("step", 0), "step: 0, must be 4, as in the command"),
    ("trainer", WeightsCopied, say("digests.0", bytes(8)), "digests: 8 bytes, must be 16: 8 for each tensor .*"),
    ("trainer", WeightsCopied, say("digests", []), "digests: .*, must be 16: 8 for each tensor .*"),
    ("trainer", WeightsCopied, say("version", 2), "version: 2, must be 3, as in the command"),
    ("refit", TransfersPlanned, say("programs.rollout-7", b"p"), "programs: rollout-7, must be one of those in .*"),
    ("refit", TransfersPlanned, say("programs", {"trainer-0": b"p"}), "programs: rollout-0/., must be one .*"),
    ("refit", TransfersPlanned, say("programs.trainer-0", b""), r"programs\[...\]: Expected `bytes` of length >= 1"),
    ("refit", TransfersPlanned, say("senders", ["trainer-1"]), "senders: trainer-1, must be one of .*"),
    (
        "refit",
        TransfersPlanned,
        say("transfer_groups.0.members.1", "x"),
        r"transfer_groups\['to rollout-0'\]: x, must be one of .*",
    ),
    ("refit", TransfersPlanned, say("num_bytes", {"trainer-0": 4}), "num_bytes: trainer-0, must be a link, .*"),
    ("refit", TransfersPlanned, say("num_bytes", {"trainer-0>x": 4}), "num_bytes: x, must be one of .*"),
    ("refit", TransfersPlanned, say("predicted_s", INF), "predicted_s: Expected `float` <= .*"),
    ("refit", VersionCommitted, say("version", 4), "version: 4, must be 3, as in the command"),
    ("refit", VersionCommitted, say("differing", {"rollout-1": "a"}), "differing: rollout-1, must be one of .*"),
    ("refit", VersionCommitted, say("differing", {"trainer-0": "a"}), "differing: trainer-0, must be one of .*"),
    ("refit", VersionCommitted, say("digest", -1), "digest: Expected `int` >= 0"),
]


@pytest.mark.parametrize(
    ("kind", "message", "tamper", "what"), SAID, ids=[f"{s[1].__name__}-{s[3][:30]}" for s in SAID]
)
def test_an_answer_that_cannot_be_is_one_line(
    hub: ListeningSocket, kind: ServiceKind, message: type[Message], tamper: Tampering, what: str
) -> None:
    room = Room(hub, kind)
    room.talk(kind, message)
    event = room.say(tampered(*answer(kind, message), tamper))
    assert isinstance(event, ProcessLost)
    assert event.process == f"{kind}-0"
    assert re.fullmatch(rf"it broke the protocol: {message.__name__}(\.|: ){what}", event.reason), event.reason


def test_generated_before_any_sample(hub: ListeningSocket) -> None:
    room = Room(hub, "rollout")
    room.talk("rollout", SamplesFinished)
    event = room.say(encode(GENERATED))
    assert isinstance(event, ProcessLost)
    assert (
        event.reason
        == "it broke the protocol: Generated.command_id: 13, must be of a command whose 4 samples were sent"
    )


def test_the_answer_to_another_members_command(hub: ListeningSocket) -> None:
    room = Room(hub, "trainer", index=1)
    room.registry.command("trainer-0", Train(**command(23), step=STEP, sources=SOURCES), [b""])
    event = room.say(encode(TRAINED))
    assert isinstance(event, ProcessLost)
    assert (event.process, event.reason) == (
        "trainer-1",
        "it broke the protocol: Trained.command_id: 23, must be of a command to trainer-1, not to trainer-0",
    )
    event = room.say(encode(Failed(command_id=23, phase="", error="", expected=True)))
    assert isinstance(event, ProcessLost)
    assert "Failed.command_id: 23, must be of a command to trainer-1" in event.reason


def test_only_one_rank_has_metrics(hub: ListeningSocket) -> None:
    room = Room(hub, "trainer", index=1)
    room.command(Train(**command(23), step=STEP, sources=SOURCES))
    event = room.say(encode(TRAINED))
    assert isinstance(event, ProcessLost)
    assert "Trained.metrics: {'loss': 0.5, 'reward/a': -1.0}, must be empty: trainer-0 has them" in event.reason


def test_texts_that_are_too_long(hub: ListeningSocket) -> None:
    for message in (Heartbeat(phase="x" * 10_001), Failed(command_id=1, phase="", error="x" * 10_001, expected=True)):
        room = Room(hub, "trainer")
        event = room.say(encode(message))
        assert isinstance(event, ProcessLost)
        assert f"{type(message).__name__}." in event.reason
        assert event.reason.endswith("Expected `str` of length <= 10000")


def test_who_breaks_the_protocol_is_told_to_leave_and_heard_no_more(hub: ListeningSocket) -> None:
    room = Room(hub, "rollout")
    room.command(BuildEngine(**command(10)))
    event = room.say(encode(EngineBuilt(command_id=10, layouts=(), samples_at=at("tcp://10.0.0.1:1"))))
    assert isinstance(event, ProcessLost)
    headers = room.members[0].told()
    assert msgspec.msgpack.decode(headers[-1], type=Shutdown).reason == event.reason
    room.registry.dismiss("rollout-0", "another takes its place")
    room.members[0].send(encode(BUILT))
    assert list(room.registry.receive(0.2)) == []


def test_a_member_that_is_dismissed_is_told_to_go(hub: ListeningSocket) -> None:
    room = Room(hub, "trainer")
    room.members[0].told()
    room.registry.dismiss("trainer-0", "another takes its place")
    (told,) = [msgspec.msgpack.decode(header, type=Shutdown) for header in room.members[0].told()]
    assert told.reason == "another takes its place"
    assert room.registry.processes == {}


def test_what_was_asked_before_a_term_is_answered_in_vain(hub: ListeningSocket) -> None:
    room = Room(hub, "rollout")
    room.command(BuildEngine(**command(10)))
    (joined,) = room.registry.begin_attempt()
    assert (joined.process, joined.kind) == ("rollout-0", "rollout")
    room.members[0].send(encode(msgspec.structs.replace(BUILT, command_id=10)))
    assert list(room.registry.receive(0.2)) == []
    room.command(BuildEngine(**command(11)))
    event = room.say(encode(msgspec.structs.replace(BUILT, command_id=11)))
    assert isinstance(event, ProcessReplied)


def test_a_failure_closes_its_command(hub: ListeningSocket) -> None:
    room = Room(hub, "rollout")
    room.command(BuildEngine(**command(10)))
    failed = Failed(command_id=10, phase="building", error="no", expected=True)
    event = room.say(encode(failed))
    assert isinstance(event, CommandErred)
    room.members[0].send(encode(failed))
    assert list(room.registry.receive(0.2)) == []


def engine(command: Generate = GENERATE) -> Replies:
    """Return what is known after an engine has been given a command to generate."""
    replies = Replies(LIMITS)
    for each, answers in EXCHANGES["rollout"][:2]:
        replies.expect("rollout-0", each)
        for message, came in answers:
            assert replies.take("rollout-0", message, came)  # type: ignore[arg-type]
    replies.expect("rollout-0", command)
    return replies


def test_what_a_command_to_generate_gives_up_is_not_heard_any_more() -> None:
    replies = engine()
    replies.expect("rollout-0", msgspec.structs.replace(GENERATE, command_id=16, cancel_before=13))
    assert replies.take("rollout-0", FINISHED, {})
    replies.expect("rollout-0", msgspec.structs.replace(GENERATE, command_id=17, cancel_before=17))
    for command_id in (13, 16):
        assert not replies.take("rollout-0", msgspec.structs.replace(FINISHED, command_id=command_id), {})
    assert replies.take("rollout-0", msgspec.structs.replace(FINISHED, command_id=17), {})


def with_versions(oldest: int, newest: int) -> SamplesFinished:
    counts = (*[0] * (newest - oldest), SAMPLES[0].response_length)
    versions: Any = {"oldest_version": oldest, "newest_version": newest, "tokens_by_version": counts}
    first = msgspec.structs.replace(SAMPLES[0], **versions)
    return msgspec.structs.replace(FINISHED, samples=(first,))


def test_an_engine_may_take_a_version_while_it_generates() -> None:
    replies, mixed = engine(), with_versions(3, 5)
    with pytest.raises(WireError, match=r"newest_version: 5, .*held then: 3"):
        replies.take("rollout-0", mixed, {})
    replies.expect("rollout-0", Refit(**command(16), version=4, only=("rollout-1",)))  # which it passes on
    replies.expect("rollout-0", Refit(**command(17), version=5))
    assert replies.take("rollout-0", mixed, {})
    with pytest.raises(WireError, match=r"newest_version: 4, .*held then: 3, 5"):
        replies.take("rollout-0", with_versions(3, 4), {})
    with pytest.raises(WireError, match=r"oldest_version: 5, must be at most the newest, 3"):
        replies.take("rollout-0", with_versions(5, 3), {})
    assert replies.take("rollout-0", msgspec.structs.replace(REFITTED, command_id=17, version=5), {})
    replies.expect("rollout-0", msgspec.structs.replace(GENERATE, command_id=18, cancel_before=18))
    with pytest.raises(WireError, match=r"oldest_version: 3, .*held then: 5"):
        replies.take("rollout-0", msgspec.structs.replace(mixed, command_id=18), {})


@pytest.mark.parametrize("is_open", [False, True], ids=["answered", "open"])
def test_versions_that_no_answer_can_name_are_forgotten(*, is_open: bool) -> None:
    """A run makes one a step, for ever; an engine may answer with any since it got what it has not answered yet."""
    replies, last = engine(), 200
    if not is_open:
        replies.forget_commands()
    for version in range(VERSION + 1, last + 1):
        replies.expect("rollout-0", Refit(**command(2 * version + 100), version=version))
        answer_of_it = msgspec.structs.replace(REFITTED, command_id=2 * version + 100, version=version)
        assert replies.take("rollout-0", answer_of_it, {})
    assert (len(replies._states["rollout-0"].versions) < 4) != is_open
    if is_open:
        assert replies.take("rollout-0", with_versions(VERSION, last), {})
    replies.expect("rollout-0", msgspec.structs.replace(GENERATE, command_id=1000, cancel_before=1000))
    with pytest.raises(WireError, match=f"held then: {last}"):
        replies.take("rollout-0", msgspec.structs.replace(with_versions(VERSION, last), command_id=1000), {})
    assert replies.take("rollout-0", msgspec.structs.replace(with_versions(last, last), command_id=1000), {})


def test_ranks_that_lack_samples_name_rollouts_that_have_them(hub: ListeningSocket) -> None:
    room = Room(hub, "trainer")
    room.command(Train(**command(23), step=STEP, sources=SOURCES))
    missing = SamplesMissing(command_id=23, step=STEP, rollouts={"rollout-0": "it is gone"})
    event = room.say(encode(missing))
    assert isinstance(event, ProcessReplied)
    assert event.reply == missing
    room.command(Train(**command(25), step=STEP, sources=SOURCES))
    event = room.say(encode(SamplesMissing(command_id=25, step=STEP, rollouts={"rollout-1": "it is gone"})))
    assert isinstance(event, ProcessLost)
    assert "SamplesMissing.rollouts: rollout-1, must be one of those in the command" in event.reason


def test_another_of_the_name_begins_anew() -> None:
    replies = engine()
    replies.forget("rollout-0")
    assert not replies.take("rollout-0", FINISHED, {})
    replies.expect("rollout-0", msgspec.structs.replace(GENERATE, command_id=16))
    with pytest.raises(WireError, match=r"held then: none"):
        replies.take("rollout-0", msgspec.structs.replace(FINISHED, command_id=16), {})
