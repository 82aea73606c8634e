"""A supervisor and what it supervises, which is a program of a few lines here: signs of life, and how often."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tandem.common.errors import FAILED
from tandem.common.process_lifetime import reaper
from tandem.config.schema import ClusterConfig, ReplyDeadlines
from tandem.launch.supervisor import Supervisor

START_S, ROUND_S = 8.0, 1.0
"""The first is longer than a machine that has much to do takes to start Python."""
CLUSTER = ClusterConfig(
    trainers=1,
    rollouts=1,
    launch="all",
    max_replacements=3,
    heartbeat_timeout_s=ROUND_S / 2,
    deadlines=ReplyDeadlines(join_s=START_S),
)
BEGINS = f"""
import os, signal, sys, time
from pathlib import Path
import msgspec
from tandem.config.schema import ClusterConfig
from tandem.launch.supervision import SupervisorConnection

cluster = msgspec.json.decode({msgspec.json.encode(CLUSTER)!r}, type=ClusterConfig)
supervision = SupervisorConnection(int(sys.argv[-1]), int(sys.argv[-3]), cluster)
with Path("lives.txt").open("a") as lives:
    print(supervision.begun.why, len(supervision.begun.replaced_at), file=lives)
life = len(Path("lives.txt").read_text().splitlines())
"""
"""What each of these programs begins with: it says how often it has lived."""


@pytest.fixture(autouse=True)
def _adopts_nobody_afterwards() -> Iterator[None]:
    """Have the test's own process, which a supervisor has run in, adopt no orphans of later tests."""
    yield
    with reaper():
        pass


def supervised(folder: Path, program: str) -> tuple[int, list[str]]:
    """Supervise a program; return the exit code, and what each of its lives began with."""
    (folder / "program.py").write_text(BEGINS + textwrap.dedent(program))
    code = Supervisor([], folder / "run", CLUSTER, [sys.executable, "program.py"]).run([])
    return code, (folder / "lives.txt").read_text().splitlines()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("first", ["pass", "supervision.start()", "supervision.show_life(); supervision.leave_loop()"])
def test_a_coordinator_that_is_stopped_where_no_loop_goes_round_is_missed(folder: Path, first: str) -> None:
    """From its first moment on, once it has said that it is there, and between loops."""
    code, lives = supervised(
        folder,
        f"""
        if life == 1:
            {first}
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
    )
    assert code == 0
    first_began, second_began = lives
    assert first_began == " 0"
    silence = re.fullmatch(r"no sign of life for (\d+) s 1", second_began)
    assert silence is not None, second_began
    assert int(silence[1]) >= START_S, "and more on a busy machine"


def test_who_takes_long_to_begin_is_not_taken_for_one_that_is_stopped(folder: Path) -> None:
    code, lives = supervised(folder, f"supervision.start(); time.sleep({1.2 * START_S})")
    assert (code, lives) == (0, [" 0"])


def test_a_loop_that_does_not_go_round_is_missed_though_its_process_is_there(folder: Path) -> None:
    code, lives = supervised(
        folder,
        f"""
        supervision.start()
        for _ in range(20):
            supervision.show_life()
            time.sleep(0.05)
        if life == 1:
            time.sleep({10 * START_S})
        """,
    )
    assert code == 0
    first, second = lives
    assert first == " 0"
    assert re.fullmatch(r"no sign of life for [1-9]\d* s 1", second), second  # one second, or more on a busy machine


def test_a_loop_that_waits_for_a_disk_is_not_missed(folder: Path) -> None:
    code, lives = supervised(
        folder,
        f"""
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.harness.disk_waits import wait_as_for_disk

        supervision.start()
        supervision.show_life()
        wait_as_for_disk({4 * ROUND_S})
        supervision.show_life()
        supervision.leave_loop()
        """,
    )
    assert (code, lives) == (0, [" 0"])


def test_one_bound_is_for_all_that_is_replaced_the_coordinator_included(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lives = supervised(folder, "supervision.replaced(life - 1); os.kill(os.getpid(), signal.SIGKILL)")
    why = f"killed by {signal.SIGKILL.name}"
    assert lives == [" 0", f"{why} 1", f"{why} 3"]
    assert code == FAILED
    said = f"error: the coordinator was {why}; processes were replaced 3 times before (cluster.max_replacements)\n"
    assert capsys.readouterr().err == said


def test_a_coordinator_that_fails_by_itself_is_started_again_after_pauses_that_grow(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lives = supervised(folder, "raise SystemExit(1 if life < 3 else 0)")
    assert (code, lives) == (0, [" 0", "exit code 1 1", "exit code 1 2"])
    said = "the coordinator has failed with exit code 1; it is started again in {} s"
    assert capsys.readouterr().out.splitlines() == [said.format(1), said.format(2)]


@pytest.mark.parametrize("ends", ["supervision.give_up(); raise SystemExit(1)", "raise SystemExit(2)"])
def test_what_the_user_is_to_change_is_not_tried_again(folder: Path, ends: str) -> None:
    code, lives = supervised(folder, ends)
    assert lives == [" 0"]
    assert code == (2 if "(2)" in ends else FAILED)


@pytest.mark.parametrize("is_final", [False, True])
def test_who_takes_anothers_place_and_fails_before_its_loop_is_replaced_unless_the_error_is_the_users(
    folder: Path, is_final: bool
) -> None:
    """The machine may have been too busy for it to start; what the run begins with is what it began with."""
    code, lives = supervised(
        folder,
        f"""
        from tandem.common.errors import ConfigError, DeadlineExceeded

        if life == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if life == 2:
            error = ConfigError("k: wrong") if {is_final} else DeadlineExceeded("who", "importing", "took long")
            supervision.fail(error)
            raise SystemExit(1)
        """,
    )
    assert lives == [" 0", "killed by SIGKILL 1", *([] if is_final else ["exit code 1 2"])]
    assert code == (FAILED if is_final else 0)


def test_who_is_asked_to_end_in_a_pause_ends_at_once(folder: Path) -> None:
    """The signal comes to the supervisor, which is this process, when the coordinator is gone."""
    code, lives = supervised(
        folder,
        """
        import subprocess
        tell = "import os, time\\nwhile os.path.exists('/proc/%d'): time.sleep(0.1)\\nos.kill(%d, 15)"
        if life == 3:
            tell %= os.getpid(), os.getppid()
            subprocess.Popen([sys.executable, "-c", tell], start_new_session=True)
        raise SystemExit(1)
        """,
    )
    assert len(lives) == 3
    assert code == FAILED
