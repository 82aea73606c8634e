"""Sandboxes of Harbor's tasks: what programs there see, what they may do, and what ends with them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest

import tandem.samples.packaged_environments.programs as programs

sys.path.append(str(Path(programs.__file__).parent))
import enclose
from enclosed import EnclosedSandbox, EndedCommand, SandboxLost, SandboxRefused, add_to
from harbor_dockerfile import TaskDockerfile, TaskRefused

LIMITS = {"DATA": 512 << 20, "FSIZE": 48 << 20, "NPROC": 64, "NOFILE": 1024, "CORE": 0}
SETTINGS: dict[str, Any] = {
    "root": None,
    "paths": [],
    "network": False,
    "storage_bytes": 32 << 20,
    "storage_files": 10_000,
    "folders": ["/logs", "/logs/verifier"],
    "limits": LIMITS,
}
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
WAIT_S = 300.0
SHELL = ("bash", "cat", "ls", "rm", "mkdir")


@contextlib.asynccontextmanager
async def begun(**changes: Any) -> AsyncIterator[Callable[[str], Coroutine[Any, Any, EndedCommand]]]:
    """Yield what runs a line of the shell in a sandbox."""
    enclosed = EnclosedSandbox({**SETTINGS, **changes})
    await enclosed.begin()
    try:
        yield lambda line: enclosed.run(["/bin/bash", "-c", line], ENV, "/tmp", WAIT_S)
    finally:
        await enclosed.end()


def run(line: str, **changes: Any) -> EndedCommand:
    """Run a line of the shell in a sandbox of its own."""

    async def run_it() -> EndedCommand:
        async with begun(**changes) as shell:
            return await shell(line)

    return asyncio.run(run_it())


try:
    run("true")
except SandboxRefused as error:
    pytest.skip(str(error), allow_module_level=True)


def test_a_program_sees_nothing_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its folders, its variables, its processes, its descriptors, nor what it listens on."""
    (tmp_path / "key").write_text("secret of the run")
    monkeypatch.setenv("SOME_API_KEY", "secret of the run")
    held = os.open(tmp_path / "key", os.O_RDONLY)
    os.set_inheritable(held, True)
    server = subprocess.Popen([sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"], cwd=tmp_path)
    try:
        ended = run(
            f"cat {tmp_path}/key /proc/*/root{tmp_path}/key; env; cat /proc/*/environ | tr '\\0' '\\n';"
            f"ls -l /proc/*/fd; ls {Path.home()} /home {Path.cwd()}; cat /proc/[0-9]*/comm;"
            f"grep -c : /proc/net/dev"
        )
    finally:
        server.kill()
        server.wait()
        os.close(held)
    assert "secret" not in ended.output + ended.errors
    assert str(tmp_path) not in ended.output
    *_, interfaces = ended.output.split()
    assert interfaces == "1", "the loopback of its own"
    names = set(run("cat /proc/[0-9]*/comm").output.split())
    assert names <= {"bash", "cat", "python", "python3", f"python3.{sys.version_info.minor}"}
    assert len(run("ls -d /proc/[0-9]*").output.split()) <= 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("unshare -U true", "unshare failed"),
        ("unshare -m true", "not permitted"),
        ("mount -o remount,rw /usr", "denied"),
        ("mount -t tmpfs none /mnt", "denied"),
        ("umount /proc", "umount: /proc"),
        ("echo 0 > /proc/sys/kernel/panic", "denied"),
        ("cat /proc/1/environ", "denied"),
        ("touch /usr/bin/new", "Read-only"),
        ("echo > /dev/tcp/127.0.0.1/22", "refused"),
        ("echo > /dev/tcp/192.0.2.1/80", "unreachable"),
    ],
)
def test_a_program_cannot_reach_out_of_it(line: str, reason: str) -> None:
    ended = run(line)
    assert ended.code != 0
    assert reason in ended.errors


def test_a_program_has_the_machines_network_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("from the machine\n")
    with socketserver.TCPServer(
        ("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        place = f"/dev/tcp/127.0.0.1/{server.server_address[1]}"
        ask = f"exec 3<>{place} && printf 'GET /page HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        reached, kept_away = run(ask, network=True), run(ask)
        server.shutdown()
        thread.join()
    assert reached.output.endswith("from the machine\n")
    assert "refused" in kept_away.errors


def test_a_program_is_root_of_what_is_its_own() -> None:
    ended = run(
        "id -u; touch /etc/new /root/new /new; chmod 600 /new; mkdir -p /app/a; echo x > /logs/verifier/y; ls /new"
    )
    assert (ended.code, ended.output) == (0, "0\n/new\n")


def test_limits_cost_the_program_that_passes_them() -> None:
    async def pass_them() -> None:
        async with begun() as shell:
            big = await shell("head -c 100M /dev/zero > /tmp/big; stat -c %s /tmp/big; rm /tmp/big")
            assert 0 < int(big.output) <= SETTINGS["storage_bytes"]
            forks = await shell("for i in $(seq 200); do sleep 100 & done")
            assert "fork" in forks.errors
            assert (await shell("kill -9 -1; kill -9 1")).output == ""
            assert (await shell("echo alive")).output == "alive\n"
            holes = await shell("truncate -s 1T /tmp/holes")
            assert holes.code != 0
            endless = await shell("yes | head -c 40M")
            assert len(endless.output) == 16 << 20

    asyncio.run(pass_them())


def test_others_stay_when_a_command_ends_and_when_one_takes_too_long() -> None:
    async def leave_some() -> None:
        enclosed = EnclosedSandbox(SETTINGS)
        await enclosed.begin()
        try:
            first = await enclosed.run(
                ["/bin/bash", "-c", "(sleep 1; echo late > /tmp/late) & echo one"], ENV, "/tmp", None
            )
            assert first == (0, "one\n", "")
            with pytest.raises(TimeoutError):
                await enclosed.run(["/bin/bash", "-c", "sleep 1000"], ENV, "/tmp", 0.1)
            line = "until test -e /tmp/late; do sleep 0.1; done; cat /tmp/late; pgrep -x sleep"
            last = await enclosed.run(["/bin/bash", "-c", line], ENV, "/tmp", WAIT_S)
            assert last.output == "late\n", "nobody sleeps for 1000 seconds"
            missing = await enclosed.run(["/bin/bash", "-c", "true"], ENV, "/nowhere", None)
            assert (missing.code, missing.errors) == (127, "/nowhere: No such file or directory\n")
        finally:
            await enclosed.end()

    asyncio.run(leave_some())


def test_files_go_there_and_come_back_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("#!/bin/sh\necho $0\n")
    (tmp_path / "script.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/passwd")
    target = tmp_path / "back"

    async def send_and_receive() -> None:
        enclosed = EnclosedSandbox(SETTINGS)
        await enclosed.begin()
        try:
            await enclosed.upload("/a/b", lambda files: [add_to(files, tmp_path / n, n) for n in ("script.sh", "link")])
            ran = await enclosed.run(["/a/b/script.sh"], ENV, "/", None)
            assert ran.output == "/a/b/script.sh\n"
            async with enclosed.download("/a/b") as files:
                files.extract("./script.sh", target, filter="data")
                assert files.getmember("./link").linkname == "/etc/passwd"
            with pytest.raises(FileNotFoundError):
                async with enclosed.download("/a/c"):
                    pass
        finally:
            await enclosed.end()

    asyncio.run(send_and_receive())
    assert (target / "script.sh").read_text() == (tmp_path / "script.sh").read_text()


def test_a_sandbox_that_is_killed_is_said_to_be_lost() -> None:
    async def lose_it() -> None:
        enclosed = EnclosedSandbox(SETTINGS)
        await enclosed.begin()
        waiting = asyncio.create_task(enclosed.run(["/bin/sleep", "1000"], ENV, "/", None))
        await asyncio.sleep(0.1)
        outer = _list_sandboxes()
        outer[-1].kill()
        with pytest.raises(SandboxLost):
            await waiting
        assert enclosed.is_lost
        with pytest.raises(SandboxLost):
            await enclosed.run(["/bin/true"], ENV, "/", None)
        await enclosed.end()

    asyncio.run(lose_it())
    assert not _list_sandboxes()


def test_nothing_is_left_of_a_sandbox_whose_starter_is_killed() -> None:
    source = (
        "import asyncio, json, sys, os\n"
        "sys.path.append(os.path.dirname(sys.argv[1]))\n"
        "from enclosed import EnclosedSandbox\n"
        "async def main():\n"
        "    enclosed = EnclosedSandbox(json.loads(sys.argv[2]))\n"
        "    await enclosed.begin()\n"
        "    print('there', flush=True)\n"
        "    await enclosed.run(['/bin/sleep', '54321'], {}, '/', None)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", source, enclose.__file__, json.dumps(SETTINGS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"there\n"
        below = psutil.Process(starter.pid).children(recursive=True)
        assert len(below) >= 2
        starter.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=WAIT_S)
    assert not alive


def test_a_prepared_root_is_changed_in_a_copy(tmp_path: Path) -> None:
    root = _make_root(tmp_path / "root")
    ended = run(
        "cat /app/file; echo changed > /app/file; rm /app/other; mkdir /etc/new; ls /app /usr; cat /app/file", root=root
    )
    assert ended.output == "original\n/app:\nfile\n\n/usr:\nbin\nchanged\n", ended.errors
    assert run("cat /app/file /app/other", root=root).output == "original\nother\n"
    assert (tmp_path / "root" / "app" / "file").read_text() == "original\n"


def test_what_paths_name_is_seen_read_only(tmp_path: Path) -> None:
    shown = tmp_path / "data"
    shown.mkdir()
    (shown / "file").write_text("seen\n")
    tmp_path.chmod(0o755)
    shown.chmod(0o755)
    ended = run(f"cat {shown}/file; echo > {shown}/file", paths=[str(shown)])
    assert ended.output == "seen\n"
    assert "Read-only" in ended.errors


def test_a_machine_that_makes_no_sandbox_is_refused_with_a_line() -> None:
    with pytest.raises(SandboxRefused, match=r"this machine makes no sandbox: .*nowhere"):
        run("true", root="/nowhere")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("FROM a\nRUN apt-get update && \\\n  apt-get install x", r"RUN apt-get, which needs an image: .*\(root\)"),
        ("FROM a\nFROM b", "2 stages"),
        ("FROM a\nADD x /", "ADD x /"),
        ("FROM a\nCOPY --from=b x /", "--from=b"),
        ("FROM a\nCOPY absent /", "absent, which its environment does not have"),
        ("FROM a\nCOPY ../secret /", "does not have"),
        ("FROM a\nUSER agent", "USER agent"),
    ],
)
def test_a_dockerfile_that_needs_a_build_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text(text)
    with pytest.raises(TaskRefused, match=reason):
        TaskDockerfile(folder, runs_are_done=False, copies_are_done=False)


def test_a_dockerfile_is_followed_as_far_as_that_needs_no_build(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.sh"):
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(
        "# comment\nFROM python:3.13\nARG WHERE=app\nENV A=1 B='2 3'\nENV C ${A}x\nWORKDIR /${WHERE}\nWORKDIR sub\n"
        'COPY *.txt data/\nCOPY --chmod=755 c.sh /bin/c\nCOPY ["c.sh", "."]\nRUN <<EOF\nCOPY x y\nEOF\nCMD bash\n'
    )
    followed = TaskDockerfile(tmp_path, runs_are_done=True, copies_are_done=False)
    assert (followed.workdir, followed.env) == ("/app/sub", {"A": "1", "B": "2 3", "C": "1x"})
    assert [(sorted(path.name for path in each[0]), *each[1:]) for each in followed.copies] == [
        (["a.txt", "b.txt"], "/app/sub/data", True, None),
        (["c.sh"], "/bin/c", False, 0o755),
        (["c.sh"], "/app/sub", True, None),
    ]


def _list_sandboxes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if any(word.endswith("enclose.py") for word in each.cmdline())]


def _make_root(folder: Path) -> str:
    """Make a root file system with a shell, by copies of the machine's own."""
    (folder / "usr" / "bin").mkdir(parents=True)
    (folder / "bin").symlink_to("usr/bin")
    for name in SHELL:
        program = shutil.which(name)
        assert program is not None
        shutil.copy(program, folder / "usr" / "bin")
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in (word for word in listed.split() if word.startswith("/")):
            (folder / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, folder / library[1:])
    (folder / "app").mkdir()
    (folder / "app" / "file").write_text("original\n")
    (folder / "app" / "other").write_text("other\n")
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.lchown(path, enclose.NOBODY, enclose.NOBODY)
    return str(folder)
