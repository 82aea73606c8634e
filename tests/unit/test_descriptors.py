"""The limit on descriptors: each process raises it as far as it may, and one that is low is said."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import textwrap

import pytest

from tandem.common.descriptors import wait_to_read, wait_to_write

LOOK = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    soft, hard = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    from tandem.common import descriptors
    from tandem.launch.doctor.look import look_at_machine
    print(next(each for each in look_at_machine(Path(".")) if each.name == "open files"))
    print(descriptors.describe_low_limit())
    print("then", descriptors.raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
    """
)


def looked(soft: int, hard: int) -> str:
    words = [sys.executable, "-c", LOOK, str(soft), str(hard)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, env={**os.environ}).stdout


def test_a_low_limit_is_said_and_raised() -> None:
    said = looked(200, 300)
    assert "status='warning'" in said
    assert "300 files and connections may be open in a process of a run" in said
    assert "a process may have 300 files and connections open on this host (hard limit)" in said
    assert "then 300 (300, 300)" in said


@pytest.mark.parametrize("soft", [256, 4096])
def test_a_high_limit_is_no_warning(soft: int) -> None:
    said = looked(soft, 4096)
    assert "status='ok'" in said
    assert "None" in said
    assert "then 4096 (4096, 4096)" in said


def test_a_descriptor_of_any_number_is_waited_for() -> None:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        with pytest.raises(ValueError, match="out of range"):
            select.select([1500], [], [], 0.0)
        os.dup2(receiver.fileno(), 1500)
        try:
            assert not wait_to_read(1500, 0.01)
            assert wait_to_write(1500, 0.0)
            sender.send(b"x")
            assert wait_to_read(1500, None)
            assert os.read(1500, 1) == b"x"
            sender.close()
            assert wait_to_read(1500, 1.0), "its end can be read"
        finally:
            os.close(1500)
