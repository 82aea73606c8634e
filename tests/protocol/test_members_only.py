"""Who is no member: on the real sockets of every plane, a stranger reads nothing and is not obeyed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.errors import TandemError
from tandem.common.keys import ProcessKeys
from tandem.common.messages import (
    PROTOCOL_VERSION,
    FetchSamples,
    FromSampleStore,
    Goodbye,
    Heartbeat,
    Hello,
    Leaving,
    Listener,
    Problem,
    ResponseToScore,
    ScoreResponses,
    ServiceKind,
    Shutdown,
    ToRefit,
    ToRollout,
    ToTrainer,
    TrainerKeys,
    Welcome,
)
from tandem.common.wire import CallerConnections, Hub, Link, MessageCodec, encode
from tandem.config import build_config
from tandem.coordinator.api.configuration import of_rewards
from tandem.coordinator.api.reward_server import ProgramRewardServer
from tandem.coordinator.api.rewards import reward_functions
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.processes.replies import Replies, SampleLimits
from tandem.coordinator.scheduler.events import EngineDraining, Event, ProcessJoined, ProcessLost
from tandem.launch.admission import HeartbeatSettings, ListeningSocket
from tandem.samples.batch import SampleBatch
from tandem.samples.sample_store import SampleStore
from tests.harness.members import ANY_ADDRESS, MEMBER, RUN, dealer_to, open_listening
from tests.harness.strangers import Tap, strangers

SECRET = b"a word that is in the configuration alone"
WAIT_S = 120.0
UNIONS: dict[ServiceKind, Any] = {"trainer": ToTrainer, "rollout": ToRollout, "refit": ToRefit}
JOINING = ProcessKeys(coordinator=RUN.coordinator.public, own=RUN.joining, is_joining=True)


def hello(kind: ServiceKind, registers: str | None = None) -> Hello:
    return Hello(protocol_version=PROTOCOL_VERSION, service=kind, host="here", pid=1, registers=registers)


@pytest.fixture
def listening() -> Iterator[ListeningSocket]:
    listening = open_listening()
    yield listening
    listening.hub.close()


@pytest.fixture
def registry(listening: ListeningSocket) -> ProcessRegistry:
    expected: dict[ServiceKind, int] = {"refit": 1, "trainer": 1, "rollout": 2}
    limits = SampleLimits(vocabulary=50, max_tokens=12, max_turns=2)
    return ProcessRegistry(
        listening, expected, SECRET, "run", HeartbeatSettings(interval_s=0.1, timeout_s=100.0), Replies(limits)
    )


def events(registry: ProcessRegistry, until: Callable[[Event], bool]) -> list[Event]:
    """Return what happens up to something."""
    found: list[Event] = []
    deadline = time.monotonic() + WAIT_S
    while not (found and until(found[-1])):
        assert time.monotonic() < deadline, found
        found.extend(registry.receive(0.05))
    return found


def join(registry: ProcessRegistry, kind: ServiceKind, address: str = "", keys: ProcessKeys = JOINING) -> Link[Any]:
    """Join a process, as one does that was started by hand."""
    link: Link[Any] = Link(address or registry.address, kind, f"{kind}-{time.monotonic_ns()}", UNIONS[kind], keys)
    thread = threading.Thread(target=link.join, args=(hello(kind), WAIT_S))
    thread.start()
    events(registry, lambda event: isinstance(event, ProcessJoined))
    thread.join(WAIT_S)
    return link


def test_a_stranger_at_the_coordinator_reads_nothing_and_does_not_join(
    registry: ProcessRegistry, listening: ListeningSocket
) -> None:
    with strangers(listening.hub.at) as those:
        for stranger in those.values():
            stranger.say(encode(hello("refit")))
            stranger.say(encode(hello("refit", registers=MEMBER.public)))
        link = join(registry, "refit")
        assert registry.processes.keys() == {"refit-0"}, "the one with the key took the only place"
        assert MEMBER.public not in listening.admitted
        assert not any(each.heard() for each in those.values())
        link.close("done")


def test_with_the_joining_key_alone_one_is_told_nothing_and_orders_nothing(
    registry: ProcessRegistry,
) -> None:
    context, socket = dealer_to(registry.address, RUN.joining)
    socket.send_multipart(encode(hello("refit")))
    socket.send_multipart(encode(Goodbye(reason="I am the trainer")))
    link = join(registry, "refit")
    assert registry.processes.keys() == {"refit-0"}
    assert not socket.poll(0)
    socket.close()
    context.term()
    link.close("done")


def test_who_is_lost_is_shut_out_by_its_key(registry: ProcessRegistry) -> None:
    first = join(registry, "rollout")
    registry.dismiss("rollout-0", "it is lost")
    first.send(encode(Goodbye(reason="I still speak")))
    own = ProcessKeys(coordinator=RUN.coordinator.public, own=first.own, is_joining=False)
    back: Link[Any] = Link(registry.address, "rollout", "rollout-again", ToRollout, own)
    with pytest.raises(TandemError, match="does not accept the key of this process"):
        back.join(hello("rollout"), WAIT_S)
    second = join(registry, "rollout")
    second.send(encode(Goodbye(reason="the second leaves")))
    (event,) = events(registry, lambda event: isinstance(event, ProcessLost))
    assert isinstance(event, ProcessLost)
    assert event.reason == "it left: the second leaves"
    for link in (first, second):
        link.close("done")


def test_who_is_shut_out_is_not_heard_over_the_connection_that_it_has() -> None:
    admitted = AdmittedKeys([MEMBER.public])
    hub = Hub(ANY_ADDRESS, RUN.coordinator, admitted)
    context, socket = dealer_to(hub.address, MEMBER)

    def heard() -> list[bytes]:
        """Return what is heard once something has arrived."""
        return [bytes(frame) for _, frames in hub.receive(WAIT_S) for frame in frames]

    socket.send(b"as a member")
    assert heard() == [b"as a member"]
    admitted.remove(MEMBER.public)
    socket.send(b"shut out")
    assert heard() == []
    admitted.add(MEMBER.public)
    socket.send(b"as a member again")
    assert heard() == [b"as a member again"]
    socket.close()
    context.term()
    hub.close()


def test_rollouts_may_join_beside_those_that_are_waited_for_and_leave(listening: ListeningSocket) -> None:
    limits = SampleLimits(vocabulary=50, max_tokens=12, max_turns=2)
    heartbeat = HeartbeatSettings(interval_s=0.1, timeout_s=100.0)
    registry = ProcessRegistry(listening, {"rollout": 1}, SECRET, "run", heartbeat, Replies(limits), max_rollouts=3)
    links = [join(registry, "rollout") for _ in range(3)]
    assert [*registry.processes] == ["rollout-0", "rollout-1", "rollout-2"]
    reason = registry.names.refusal(hello("rollout")).reason
    assert reason == "the run has its 3 rollout processes (cluster.max_rollouts) already"
    links[2].send(encode(Leaving()))
    assert isinstance(events(registry, lambda event: isinstance(event, EngineDraining))[-1], EngineDraining)
    registry.dismiss("rollout-0", "it was told to", is_over=True, is_awaited=False)
    registry.dismiss("rollout-2", "it is lost")
    for link, is_awaited_anew in ((links[0], False), (links[2], True)):
        received = link.receive(WAIT_S)
        assert received is not None
        assert received.message.is_awaited_anew == is_awaited_anew
    links += [join(registry, "rollout"), join(registry, "rollout")]
    assert [*registry.processes] == ["rollout-1", "rollout-2", "rollout-0"], "who is lost is replaced first"
    for link in links:
        link.close("done")


def test_a_key_is_of_one_process(registry: ProcessRegistry) -> None:
    """A second connection by a member's key is nobody's, and changes nothing for the first."""
    link = join(registry, "refit")
    same = ProcessKeys(coordinator=RUN.coordinator.public, own=link.own, is_joining=False)
    other: Link[Any] = Link(registry.address, "refit", "another", ToRefit, same)
    errors: list[TandemError] = []

    def try_to_join() -> None:
        try:
            other.join(hello("refit"), 1.0)
        except TandemError as error:
            errors.append(error)

    thread = threading.Thread(target=try_to_join)
    thread.start()
    while thread.is_alive():
        assert [*registry.receive(0.05)] == []
    assert "no answer from" in str(errors[0])
    assert registry.processes.keys() == {"refit-0"}
    link.close("done")


def test_rollouts_are_told_the_keys_of_trainers_and_of_no_others(registry: ProcessRegistry) -> None:
    rollout, trainer, refit = join(registry, "rollout"), join(registry, "trainer"), join(registry, "refit")

    def await_keys(wanted: tuple[str, ...]) -> None:
        deadline = time.monotonic() + WAIT_S
        while rollout.trainers.keys() != wanted:
            assert time.monotonic() < deadline, rollout.trainers.keys()
            assert [*registry.receive(0.05)] == []

    await_keys((trainer.own.public,))
    registry.dismiss("trainer-0", "it is lost")
    await_keys(())
    again = join(registry, "trainer")
    await_keys((again.own.public,))
    for link in (rollout, trainer, refit, again):
        link.close("done")


def test_keys_of_trainers_that_were_lost_on_the_way_are_told_again(registry: ProcessRegistry) -> None:
    own = new_key_pair()
    registry.names.register(own.public)
    context, socket = dealer_to(registry.address, own)
    codec: MessageCodec[Any] = MessageCodec(ToRollout)

    def heard(kind: type) -> list[Any]:
        """Return what comes up to a message of a type."""
        found: list[Any] = []
        deadline = time.monotonic() + WAIT_S
        while not (found and isinstance(found[-1], kind)):
            assert time.monotonic() < deadline, found
            list(registry.receive(0.05))
            if socket.poll(0):
                found.append(codec.decode(socket.recv_multipart()).message)
        return found

    socket.send_multipart(encode(hello("rollout")))
    events(registry, lambda event: isinstance(event, ProcessJoined))
    trainer = join(registry, "trainer")
    told = heard(TrainerKeys)[-1]
    assert told.public_keys == (trainer.own.public,)
    socket.send_multipart(encode(Heartbeat(trainer_keys=told.number - 1)))
    assert heard(TrainerKeys)[-1] == told
    socket.send_multipart(encode(Heartbeat(trainer_keys=told.number)))
    assert {type(each) for _ in range(3) for each in heard(Heartbeat)} == {Heartbeat}
    socket.close()
    context.term()
    trainer.close("done")


def test_a_member_that_connects_again_is_heard_and_told_though_its_old_connection_seems_to_be_there(
    registry: ProcessRegistry,
) -> None:
    """Only its own end of that was broken; nobody has told the coordinator's."""
    tap = Tap(int(registry.address.rpartition(":")[2]))
    try:
        link = join(registry, "refit", tap.address)
        tap.reset()
        said: list[Any] = []
        deadline = time.monotonic() + WAIT_S
        while not said:
            assert time.monotonic() < deadline, "it is told nothing any more"
            registry.send("refit-0", encode(Shutdown(reason="over the new connection")))
            [*registry.receive(0.05)]
            said += filter(None, [link.receive(0.0)])
        link.close("it was told to")
        (lost,) = events(registry, lambda event: isinstance(event, ProcessLost))
        assert isinstance(lost, ProcessLost)
        assert lost.reason == "it left: it was told to"
    finally:
        tap.close()


def test_the_wire_carries_no_configuration_that_can_be_read(registry: ProcessRegistry) -> None:
    tap = Tap(int(registry.address.rpartition(":")[2]))
    try:
        link = join(registry, "refit", tap.address)
        link.close("the end of it")
        events(registry, lambda event: isinstance(event, ProcessLost))
    finally:
        tap.close()
    seen = bytes(tap.bytes_)
    assert b"CURVE" in seen, "the greeting is there"
    for words in (SECRET, b"Welcome", b"Hello", b"refit-0", b"the end of it", RUN.joining.secret.encode()):
        assert words not in seen


# --- a coordinator that is none ---------------------------------------------------------------------------------------


def waiting(address: str, keys: ProcessKeys = JOINING) -> Link[Any]:
    return Link(address, "rollout", "me", ToRollout, keys, "run/keys/members.json")


def test_who_pretends_to_be_a_coordinator_is_not_listened_to() -> None:
    """It speaks CURVE, and would hear anyone; it lacks the run's key."""

    class Everyone(AdmittedKeys):
        def __contains__(self, key: object) -> bool:
            return True

    hub = Hub("tcp://127.0.0.1:*", new_key_pair(), Everyone())
    is_over = threading.Event()
    heard: list[Any] = []

    def pretend() -> None:
        welcome = Welcome(
            name="rollout-0",
            index=0,
            run_id="run",
            heartbeat_interval_s=1.0,
            heartbeat_timeout_s=5.0,
            config_json=b'{"env": {"mine": {"class": "os.abort"}}}',
        )
        while not is_over.is_set():
            for peer, frames in hub.receive(0.05):
                heard.append(frames)
                hub.send(peer, encode(welcome))

    thread = threading.Thread(target=pretend)
    thread.start()
    try:
        with pytest.raises(TandemError) as refused:
            waiting(hub.address).join(hello("rollout"), WAIT_S)
    finally:
        is_over.set()
        thread.join()
        hub.close()
    assert str(refused.value) == (
        f"the process that listens at {hub.address} does not prove the coordinator's key that "
        "run/keys/members.json has: it belongs to another run, or is something else"
    )
    assert heard == []


def test_the_key_of_another_run_is_one_line_within_seconds(registry: ProcessRegistry) -> None:
    stale = ProcessKeys(coordinator=RUN.coordinator.public, own=new_key_pair(), is_joining=True)
    begun = time.monotonic()
    with pytest.raises(TandemError) as refused:
        waiting(registry.address, stale).join(hello("rollout"), 300.0)
    assert time.monotonic() - begun < WAIT_S
    assert str(refused.value) == (
        f"the coordinator at {registry.address} does not accept the key of run/keys/members.json"
    )


# --- the other planes -------------------------------------------------------------------------------------------------


def one_sample() -> SampleBatch:
    return SampleBatch(
        lengths_S=np.array([2], dtype=np.int32),
        token_ids_T=np.array([1, 2], dtype=np.int32),
        loss_mask_T=np.array([False, True]),
        generation_logprobs_T=np.zeros(2, dtype=np.float32),
        versions_T=np.array([-1, 0], dtype=np.int32),
    )


def ask(listener: Listener, frames: Any, own: Any = MEMBER) -> Any:
    """Return the answer to a member."""
    callers = CallerConnections({"it": listener}, own, max_bytes=1 << 20)
    deadline = time.monotonic() + WAIT_S
    try:
        while time.monotonic() < deadline:
            for _, answer in callers.receive(0.1):
                if answer is not None:
                    return answer
                callers.send("it", frames)
    finally:
        callers.close()
    raise AssertionError("no answer")


def test_a_stranger_at_the_samples_gets_none() -> None:
    store = SampleStore("127.0.0.1", "run", 10, AdmittedKeys([MEMBER.public]))
    fetch = encode(FetchSamples(run_id="run", request_id=1, keys=((1, 0, 0, 0),)))
    try:
        store.put((1, 0, 0), one_sample())
        with strangers(store.at) as those:
            for stranger in those.values():
                stranger.say(fetch)
            answer = MessageCodec[Any](FromSampleStore).decode(ask(store.at, fetch))
            assert answer.arrays["token_ids_T"].tolist() == [1, 2]
            assert not any(each.heard() for each in those.values())
    finally:
        store.close()


def test_a_trainer_that_the_store_has_not_heard_of_yet_gets_its_samples_when_it_has() -> None:
    trainers = AdmittedKeys()
    store = SampleStore("127.0.0.1", "run", 10, trainers)
    later = threading.Timer(1.0, trainers.add, [MEMBER.public])
    try:
        store.put((1, 0, 0), one_sample())
        later.start()
        answer = ask(store.at, encode(FetchSamples(run_id="run", request_id=1, keys=((1, 0, 0, 0),))))
        assert MessageCodec[Any](FromSampleStore).decode(answer).arrays["token_ids_T"].tolist() == [1, 2]
    finally:
        later.join()
        store.close()


def test_a_stranger_at_the_reward_functions_has_none_called() -> None:
    called: list[str] = []
    functions = reward_functions([lambda response: called.append(response) or 1.0], None)
    policy = {"model_name": "model"}
    data = {"dataset_name": "jsonl", "train_data_path": "train.jsonl", "environment": "python_rewards"}
    env = of_rewards(functions, 1.0)["env"]
    server = ProgramRewardServer(functions, build_config({"grpo": {}, "policy": policy, "data": data, "env": env}))
    listener = Listener(address=f"tcp://127.0.0.1:{server.at.port}", public_key=server.at.public_key)
    problem = Problem(problem_id="p", question="", answer="", metadata={})

    def score(response: str) -> Any:
        return encode(ScoreResponses(responses=(ResponseToScore(number=1, problem=problem, response=response),)))

    try:
        with strangers(listener) as those:
            for kind, stranger in those.items():
                stranger.say(score(kind))
            ask(listener, score("a member's"), server.at.callers)
            assert not any(each.heard() for each in those.values())
    finally:
        server.close()
    assert called == ["a member's"]


def test_frames_beyond_what_a_plane_carries_end_their_connection() -> None:
    hub = Hub("tcp://127.0.0.1:*", RUN.coordinator, AdmittedKeys([MEMBER.public]), max_bytes=1000)
    callers = CallerConnections({"it": hub.at}, MEMBER, max_bytes=1000)
    ups, heard = 0, []
    deadline = time.monotonic() + WAIT_S
    try:
        while ups < 3:  # after each frame that is too long there is a new connection
            assert time.monotonic() < deadline
            ups += len(list(callers.receive(0.05)))
            callers.send("it", [bytes(2000)])
            heard += list(hub.receive(0.0))
        assert heard == []
        while not heard:
            assert time.monotonic() < deadline
            list(callers.receive(0.05))
            callers.send("it", [b"short"])
            heard += list(hub.receive(0.05))
        hub.send(heard[0][0], [bytes(2000)])
        while callers.down_for("it") == 0.0:
            assert time.monotonic() < deadline
            assert not any(answer for _, answer in callers.receive(0.05))
    finally:
        callers.close()
        hub.close()


def test_secret_keys_are_not_shown() -> None:
    assert MEMBER.secret not in repr(MEMBER)
    assert MEMBER.secret not in repr(JOINING)
