"""Agents over a real engine: what they get, what is recorded of it, and what becomes of those that fail."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from agent_rollouts_harness import rollout_of
from agents_harness import PRELUDE, assert_probable, assert_recorded_as_seen, seen, sequences
from environment_harness import config, problem
from own_environments import WAIT_S
from rollout_harness import Rollout

from tandem.common.errors import RewardError
from tandem.common.messages import SampleScored
from tandem.common.values import LargeInteger, WrittenFloat
from tandem.rollout.environments import printing
from tandem.rollout.environments.outcomes import Failure, FaultPolicy
from tandem.samples.batch import SampleBatch
from tests.harness.descriptors import descriptors_left

Samples = dict[tuple[int, int], tuple[SampleScored, SampleBatch]]

TREE = """
first = [user("12")]
a = ask(first)
b = ask([*first, assistant(a), user("3")])
c = ask([*first, assistant(a), user("4")])       # another way from the first response
d = ask([*first, assistant(a), user("3"), assistant(b), user("5")])
e = ask(first)                                   # the same once more
f = ask([*first, {"role": "assistant", "content": text(a) + "0"}, user("3")])  # it never said so
note(a, b, c, d, e, f)
reward(0.5, correct=True, components={"half": 0.25})
"""


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def played(samples: Samples) -> Iterator[tuple[SampleScored, SampleBatch, list[dict[str, Any]]]]:
    """Yield each sample with what its agent was sent."""
    answers = {(order["problem"]["metadata"]["number"], order["sample"]): answers for order, answers in seen()}
    assert answers.keys() == samples.keys()
    for key, (scored, arrays) in samples.items():
        yield scored, arrays, answers[key]


def test_an_agent_gets_the_values_of_its_row(tmp_path: Path) -> None:
    with rollout_of(tmp_path, TREE) as rollout:
        group = rollout.group(0, [7])
        metadata = {**group.problem.metadata, "large": LargeInteger("1" * 30)}
        problem = msgspec.structs.replace(group.problem, answer=[WrittenFloat("0.10"), None], metadata=metadata)
        rollout.run(msgspec.structs.replace(group, problem=problem))
    ((order, _),) = seen()
    assert order["problem"]["answer"] == [0.1, None]
    assert order["problem"]["metadata"]["large"] == int("1" * 30)


def test_every_token_is_recorded_as_it_was_sent_in_all_branches(tmp_path: Path) -> None:
    with rollout_of(tmp_path, TREE) as rollout:
        samples = rollout.run(rollout.group(0, [7, 8]), rollout.group(1, [9]))
        for scored, arrays, answers in played(samples):
            a, b, c, d, e, f = (answer["prompt_token_ids"] for answer in answers)
            made = [answer["choices"][0]["token_ids"] for answer in answers]
            assert b[: len(a) + len(made[0])] == [*a, *made[0]] == c[: len(a) + len(made[0])]
            assert d[: len(b) + len(made[1])] == [*b, *made[1]]
            assert e == a
            assert len(scored.branches) == 4  # c, d, e and f; a and b are on the way
            assert [b.num_made for b in scored.branches] == [
                len(made[0]) + len(made[2]),
                len(made[1]) + len(made[3]),
                len(made[4]),
                len(made[5]),
            ]
            assert f[: len(a)] == a
            assert_recorded_as_seen(scored, arrays, answers)
            assert_probable(arrays, {0: rollout.model})
            assert (scored.reward, scored.correct, scored.components) == (0.5, True, {"half": 0.25})
        (again,) = (rollout.run(rollout.group(0, [7])).values(),)
        ((_, arrays),) = again
        assert arrays.token_ids_T.tolist() == samples[0, 0][1].token_ids_T.tolist(), "seeds say what is drawn"


OPENAI = """
import os, openai
client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY say where
assert os.environ["TANDEM_SESSION_URL"] == order["session_url"]
first = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[user("12")], n=2, logprobs=True, extra_body={"return_token_ids": True}
)
kept = first.choices[1].message
stream = client.chat.completions.create(
    model="policy", messages=[user("12"), kept, user("3")], stream=True, logprobs=True, max_tokens=3,
    extra_body={"return_token_ids": True},
)
chunks = [chunk.model_dump() for chunk in stream]
choices = [{**choice.model_dump()} for choice in first.choices]
answers = [{"prompt_token_ids": first.prompt_token_ids, "choices": [choice]} for choice in choices]
pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
tokens = [token for piece in pieces for token in piece.get("token_ids") or []]
logprobs = [token for piece in pieces for token in (piece["logprobs"] or {"content": []})["content"]]
answers.append({
    "prompt_token_ids": chunks[0]["prompt_token_ids"],
    "choices": [{"token_ids": tokens, "logprobs": {"content": logprobs}}],
})
note(*answers)
reward(1)
"""


def test_the_openai_client_branches_and_streams(tmp_path: Path) -> None:
    with rollout_of(tmp_path, OPENAI) as rollout:
        ((scored, arrays, answers),) = played(rollout.run(rollout.group(0, [7])))
        assert len(answers[2]["choices"][0]["token_ids"]) <= 3
        assert len(scored.branches) == 2, "the first choice, and the second with what follows it"
        assert_recorded_as_seen(scored, arrays, answers)
        assert_probable(arrays, {0: rollout.model})


WAITS = """
a = ask([user("12")])
open("asked", "w").close()
while not os.path.exists("go on"):
    time.sleep(0.01)
b = ask([user("12"), assistant(a), user("3")])
note(a, b)
reward(1)
"""


def work_until(rollout: Rollout, path: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not Path(path).exists():
        rollout.service.work()
        assert time.monotonic() < deadline


def test_weights_that_come_meanwhile_make_what_follows_and_each_token_says_which(tmp_path: Path) -> None:
    how = {"async_grpo": {"max_trajectory_age_steps": 1, "in_flight_weight_updates": True}}
    with rollout_of(tmp_path, WAITS, **how) as rollout:
        before = copy.deepcopy(rollout.model)
        rollout.start(rollout.group(0, [7]), ends=False)
        work_until(rollout, "asked")
        with torch.no_grad():
            for parameter in rollout.model.parameters():
                parameter.mul_(1.1)
        rollout.refit(1)
        Path("go on").touch()
        ((scored, arrays, answers),) = played(rollout.finish())
        assert (scored.oldest_version, scored.newest_version, scored.tokens_by_version) == (0, 1, (5, 5))
        assert_recorded_as_seen(scored, arrays, answers)
        assert_probable(arrays, {0: before, 1: rollout.model})


def test_an_episode_that_is_given_up_is_refused_and_its_program_ended(tmp_path: Path) -> None:
    source = "open('pid', 'w').write(str(os.getpid()))" + WAITS
    with rollout_of(tmp_path, source) as rollout:
        rollout.start(rollout.group(0, [7]))
        work_until(rollout, "asked")
        program = psutil.Process(int(Path("pid").read_text()))
        rollout.refit(1)
        assert not rollout.service.work()
        program.wait(WAIT_S)
        assert rollout.service.parts.engine.num_unfinished == 0
        Path("go on").touch()
        ((scored, _, _),) = played(rollout.run(rollout.group(0, [7])))
        assert scored.oldest_version == 1


REFUSED = """
answers = [
    ask([user("12")], temperature=0.3),
    ask([user("12")], top_k=3),
    ask([user("12")], presence_penalty=1),
    ask([user("12")], top_logprobs=2),
    ask([user("12" * 60)]),
    ask([user("Z")]),
    post(order["base_url"] + "/chat/completions", {"model": "gpt", "messages": [user("12")]}),
    ask([user("12")]),
    ask([user("12")]),
    ask([user("12")]),
    reward("1.0"),
    post(order["session_url"] + "/reward", b'{"reward": NaN}'),
    reward(1, corect=True),
    reward(2, components={"a": "b"}),
    reward(1.5),
    ask([user("12")]),
    reward(2),
]
note(*answers)
"""


def test_what_cannot_be_is_refused_with_a_reason_and_the_episode_goes_on(tmp_path: Path) -> None:
    with rollout_of(tmp_path, REFUSED, max_completions=2) as rollout:
        ((scored, _),) = rollout.run(rollout.group(0, [7])).values()
        deadline = time.monotonic() + WAIT_S
        while not seen():  # it goes on for a moment after its reward
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ((_, answers),) = seen()
        assert scored.reward == 1.5
        assert scored.correct
        assert scored.num_turns == 2
        said = [(answer.get("status"), answer.get("error", {}).get("message")) for answer in answers]
        expected = [
            (400, "temperature: 0.3, but training samples are drawn with policy.generation.temperature, 1"),
            (400, "top_k: 3, but training samples are drawn with policy.generation.top_k, 0"),
            (400, "response_format, top_logprobs, echo: training samples are drawn without"),
            (400, "response_format, top_logprobs, echo: training samples are drawn without"),
            (400, "the maximum context length is 64 tokens"),
            (400, "does not know the character 'Z'"),
            (404, "the model 'gpt' does not exist"),
            (None, None),
            (None, None),
            (403, "an episode may ask for 2 responses"),
            (422, "the reward is '1.0', not a finite number"),
            (422, "the reward is not a JSON object"),
            (422, "the reward posted has 'corect'"),
            (422, "the component 'a' is 'b', not a finite number"),
            (None, None),
            (410, "this episode is over"),
            (410, "this episode"),
        ]
        for (status, message), (wanted, part) in zip(said, expected, strict=True):
            assert status == wanted
            assert (message is None) == (part is None)
            assert part is None or part in message


FAILS: dict[str, tuple[str, str]] = {
    "raises": ("ask([user('1')]); raise LookupError('no such room')", r"its program ended \(it exited with code 1: "
               r"LookupError: no such room\) without a reward"),
    "silent": ("ask([user('1')])", "its program ended without a reward"),
    "killed": ("ask([user('1')]); os.kill(os.getpid(), 9)", r"ended \(killed by SIGKILL\) without a reward"),
    "lies": ("ask([user('1')]); reward('much')", "its program ended without a reward; it posted an invalid one: the "
             "reward is 'much', not a finite number"),
    "prints nonsense": ("ask([user('1')]); print('{\"reward\": Infinity}')", "the last line of its program's output: "),
    "says so": ("ask([user('1')]); post(order['session_url'] + '/error', b'the game is broken')", "the game is broken"),
    "asks nothing": ("sys.exit(3)", r"its program ended \(it exited with code 3\) without a reward"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "why"), FAILS.values(), ids=FAILS)
def test_an_agent_that_fails_is_borne_as_was_asked(tmp_path: Path, source: str, why: str) -> None:
    with rollout_of(tmp_path, source, on_error="drop") as rollout:
        ((scored, arrays),) = rollout.run(rollout.group(0, [7])).values()
        assert scored.dropped
        assert not scored.timed_out
        assert re.search(why, scored.failure), scored.failure
        assert scored.failure.startswith("environment 'mine', problem 'p0': ")
        assert (scored.response_length == 0) == (source == "sys.exit(3)")
        assert arrays.loss_mask_T.sum() == scored.response_length


def test_by_itself_the_first_failure_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with rollout_of(tmp_path, "raise LookupError('no such room')") as rollout:
        error = rollout.error(rollout.group(0, [7, 8]))
        assert "environment 'mine', problem 'p0': its program ended" in error
        assert "LookupError: no such room" in error
    assert "Traceback (most recent call last)" in capfd.readouterr().err


@pytest.mark.parametrize("has_succeeded", [False, True])
def test_episodes_that_all_fail_end_the_run_though_failures_are_borne(has_succeeded: bool) -> None:
    faults = FaultPolicy(config("mine", {"command": ["python", "agent.py"], "on_error": "zero"}))
    failure = Failure("its program ended (it exited with code 1: ModuleNotFoundError: No module named 'openai.types')")
    if has_succeeded:
        faults.succeeded()
    for _ in range(31):
        assert not faults.judged(problem(), [], failure).dropped
    if has_succeeded:
        assert not faults.judged(problem(), [], failure).dropped
        return
    with pytest.raises(RewardError) as raised:
        faults.judged(problem(), [], failure)
    assert "No module named 'openai.types') (pip install openai, where the agent's program runs)" in str(raised.value)
    assert "all of the first 32 episodes have failed" in str(raised.value)


KILLED = """
answer = ask([user("12")])
with open("begun", "a") as file:
    file.write("x")
if len(open("begun").read()) <= {times}:
    import psutil
    psutil.Process().{whom}.kill()
    time.sleep(600)
note(answer)
reward(len(text(answer)))
"""


@pytest.mark.parametrize("whom", ["children() or psutil.Process()", "parents()[1]"], ids=["itself", "launcher"])
def test_an_episode_whose_program_is_killed_from_outside_is_played_again(tmp_path: Path, whom: str) -> None:
    """By the system for want of memory, say; or what starts programs is, and they end with it."""
    with rollout_of(tmp_path, KILLED.format(times=2, whom=whom)) as rollout:  # the first failure would end the run
        ((scored, arrays, answers),) = played(rollout.run(rollout.group(0, [7])))
        assert len(Path("begun").read_text()) == 3
        assert_recorded_as_seen(scored, arrays, answers)
        assert scored.reward == len(answers[0]["choices"][0]["message"]["content"])
        Path("begun").unlink()
        assert not any(scored.dropped for scored, _ in rollout.run(rollout.group(0, [7])).values())


def test_an_episode_whose_programs_are_killed_again_and_again_has_failed(tmp_path: Path) -> None:
    source = KILLED.format(times=9, whom="parents()[1]")
    with rollout_of(tmp_path, source, on_error="drop") as rollout:
        ((scored, _),) = rollout.run(rollout.group(0, [7])).values()
        assert scored.dropped
        assert "its program ended (" in scored.failure
        assert len(Path("begun").read_text()) == 3


def test_that_no_program_can_be_started_is_no_failure_of_the_agent(tmp_path: Path) -> None:
    """Another process may have descriptors left: this one says what it lacks, and ``on_error`` is not asked."""
    with rollout_of(tmp_path, "reward(1)") as rollout:
        with descriptors_left(2):  # a program takes more
            rollout.start(rollout.group(0, [7]))
            rollout.finish()
        (error,) = rollout.context.errors
        assert isinstance(error, OSError), error
        assert error.errno == errno.EMFILE
        rollout.context.errors.clear()
        ((scored, _),) = rollout.run(rollout.group(0, [7])).values()
        assert scored.reward == 1


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with rollout_of(tmp_path, command=["no-such-agent"]) as rollout:
        assert "it exited with code 127: no-such-agent: No such file or directory" in rollout.error(
            rollout.group(0, [7])
        )


HANGS = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
ask([user("1")])
with open("pids", "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


def test_at_the_deadline_all_that_an_agent_has_started_is_ended(tmp_path: Path) -> None:
    with rollout_of(tmp_path, HANGS, on_error="zero", timeout_s=8.0) as rollout:
        samples = rollout.run(rollout.group(0, [7, 8]))
        for scored, _ in samples.values():
            assert scored.timed_out
            assert scored.reward == 0
            assert scored.failure == (
                "environment 'mine' took longer than 8 s to play an episode of problem 'p0' (env.mine.timeout_s)"
            )
        assert_gone(Path("pids").read_text().split())


def assert_gone(pids: list[str]) -> None:
    left = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(left, timeout=WAIT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_reward_may_be_the_last_line_that_is_printed(tmp_path: Path) -> None:
    source = "ask([user('1')]); print('thinking'); print(json.dumps({'reward': -2.5, 'correct': True}))"
    with rollout_of(tmp_path, source) as rollout:
        ((scored, _),) = rollout.run(rollout.group(0, [7])).values()
        assert (scored.reward, scored.correct) == (-2.5, True)


STAYS = """
import threading
open("started", "a").write("x")
def play(order):
    try:
        answer = ask([user("12")], order=order)
        note(answer, order=order)
        if order["sample"] == 1 and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(5)
        reward(len(text(answer)), order=order)
    except Exception as error:
        post(order["session_url"] + "/error", str(error).encode())
for line in sys.stdin:
    threading.Thread(target=play, args=[json.loads(line)]).start()
"""


def test_a_program_may_stay_and_play_many_and_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAYS", "1")
    with rollout_of(tmp_path, STAYS, persistent=True, on_error="drop") as rollout:
        samples = rollout.run(rollout.group(0, [7]), rollout.group(1, [8]))
        assert not any(scored.dropped for scored, _ in samples.values())
        assert Path("started").read_text() == "x", "one plays all"
        samples = rollout.run(rollout.group(0, [7, 8]))
        assert "its program ended (it exited with code 5)" in samples[0, 1][0].failure
        samples = rollout.run(rollout.group(0, [7, 8]))
        assert Path("started").read_text() == "xx"
        assert not any(scored.dropped for scored, _ in samples.values())


PLAYS_MANY = """
import threading
def play(order):
    number, sample = order["problem"]["metadata"]["number"], order["sample"]
    with open("begun", "a") as file:
        file.write(f"{number} ")
    %s
    reward(len(text(ask([user("12")], order=order))), order=order)
for line in sys.stdin:
    threading.Thread(target=play, args=[json.loads(line)], daemon=True).start()
"""


def test_an_episode_that_ends_its_program_each_time_is_the_only_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six are in play each time; the last time, each that was lost twice plays apart."""
    monkeypatch.setenv("STAYS", "1")
    kills = """
    if number == 1:
        while (num := len(open("begun").read().split())) < 12 and num % 6:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    while len(open("begun").read().split()) <= 12:
        time.sleep(0.01)
    """
    with rollout_of(tmp_path, PLAYS_MANY % kills, persistent=True, on_error="zero") as rollout:
        samples = rollout.run(rollout.group(1, [7]), rollout.group(0, [7, 8, 9, 10, 11]))
    failures = {key: scored.failure for key, (scored, _) in samples.items() if scored.failure}
    assert failures.keys() == {(1, 0)}
    assert "its program ended (killed by SIGKILL)" in failures[1, 0]
    assert not [child for child in psutil.Process().children(recursive=True) if "agent.py" in child.cmdline()]


def test_others_in_play_are_played_again_where_one_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late one began first, and the program has told nothing since."""
    monkeypatch.setenv("STAYS", "1")
    hangs = """
    if number == 0:
        time.sleep(600)
    while open("begun").read().split().count("1") < 2:
        time.sleep(0.01)
    """
    with rollout_of(tmp_path, PLAYS_MANY % hangs, persistent=True, on_error="zero", timeout_s=10) as rollout:
        rollout.start(rollout.group(0, [7]))
        while not Path("begun").exists():
            rollout.service.work()
        time.sleep(2)  # so that the deadline of the other is later by as much
        rollout.start(rollout.group(1, [8]), cancel_before=0)
        samples = rollout.finish()
    assert "took longer than 10 s" in samples[0, 0][0].failure
    assert samples[1, 0][0].failure == ""
    assert Path("begun").read_text().split() == ["0", "1", "1"]


def test_what_a_program_that_stays_writes_is_bounded_and_moves_no_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAYS", "1")
    monkeypatch.setattr(printing, "_of_minute", printing._Allowance())
    says = "sys.stderr.write('\\x1b[2J' + 'x' * 5_000_000)\nsys.stderr.flush()\n"
    with rollout_of(tmp_path, STAYS.replace("for line in", says + "for line in"), persistent=True) as rollout:
        samples = rollout.run(rollout.group(0, [7]))
        assert len(samples) == 1
        errors = capfd.readouterr().err
        assert "\\x1b[2Jxxx" in errors
        assert "\x1b" not in errors
        assert 10_000 < len(errors) < 2 * printing.MOST, "it may have begun near the end of a minute"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["content-length"])))
        space: dict[str, Any] = {}
        exec(PRELUDE.replace("json.load(sys.stdin)", "{}"), space)
        status, body = 200, {}
        try:
            space["note"](space["ask"]([space["user"]("12")], order=order), order=order)
            if order["sample"] == 0:
                body = {"reward": 0.75}
            elif order["sample"] == 1:
                space["reward"](0.5, order=order)
            else:
                status = 503
        except OSError:
            status = 500
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


def test_a_server_elsewhere_plays(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/play"
            with rollout_of(tmp_path, url=url, on_error="zero") as rollout:
                samples = rollout.run(rollout.group(0, [7, 8, 9]))
                assert [samples[0, sample][0].reward for sample in range(3)] == [0.75, 0.5, 0]
                assert f"{url} answered 503" in samples[0, 2][0].failure
                for scored, arrays, answers in played(samples):
                    assert_recorded_as_seen(scored, arrays, answers)
        finally:
            server.shutdown()
            thread.join()


def test_many_episodes_share_the_engine_and_no_more_play_than_may(tmp_path: Path) -> None:
    source = """
open(f"playing-{os.getpid()}", "w").close()
names = [name for name in os.listdir() if name.startswith("playing")]
a = ask([user("1")], max_tokens=2)
note({"n": len(names)})
os.remove(f"playing-{os.getpid()}")
reward(1)
"""
    with rollout_of(tmp_path, source, max_concurrency=3) as rollout:
        samples = rollout.run(*(rollout.group(number, [1, 2]) for number in range(5)))
        assert len(samples) == 10
        deadline = time.monotonic() + WAIT_S
        while len(seen()) < 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert max(answers[0]["n"] for _, answers in seen()) <= 3


def test_the_record_has_every_branch_and_gives_them_back(tmp_path: Path) -> None:
    from tandem.common.messages import RecordedGroup, SamplesFinished
    from tandem.samples.recorded_shards import read_step

    folder = tmp_path / "samples"
    with rollout_of(tmp_path, TREE, samples_folder=folder) as rollout:
        command_id = rollout.start(rollout.group(0, [7, 8]))
        samples = rollout.finish()
        rollout.record("rollout-0", RecordedGroup(command_id=command_id, group=0, advantages=(1.0, None)))
        found = read_step(folder, 1)
        for sample in found:
            scored, arrays = samples[sample.scored.group, sample.scored.sample]
            assert sample.scored.branches == scored.branches
            for name, array in arrays.columns.items():
                assert sample.arrays.columns[name].tolist() == array.tolist()
            first = sequences(arrays)[0].token_ids_T[: scored.prompt_length].tolist()
            assert sample.prompt == rollout.tokenizer.decode(first, skip_special_tokens=False)
            assert "\n---\n" in sample.scored.response
        rollout.release(0)
        answers = rollout.restore({"step-00000001.rollout-0.parquet": ((command_id, 0),)}, 2)
        (finished,) = [answer for answer in answers if isinstance(answer, SamplesFinished)]
        again = rollout.fetch(finished)
        assert again.token_ids_T.tolist() == [
            token for sample in range(2) for token in samples[0, sample][1].token_ids_T.tolist()
        ]


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    with rollout_of(tmp_path, "ask([user('1')]); reward(1)") as rollout:
        rollout.run(rollout.group(0, [7]))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            rollout.run(rollout.group(0, [7, 8]))
        deadline = time.monotonic() + WAIT_S
        while len(os.listdir("/proc/self/fd")) > before:
            assert time.monotonic() < deadline, os.listdir("/proc/self/fd")
            time.sleep(0.05)
