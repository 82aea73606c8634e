"""A run that the command line began, as `tandem.load_run` sees it: how it ended, and what it said."""

from __future__ import annotations

import signal

import tandem
from tests.harness.runs.running import Command, all_gone, wait_until, write_config


def test_how_a_run_ended_is_known_as_far_as_it_could_say() -> None:
    config = write_config({"grpo": {"max_num_steps": 100_000, "val_period": 0}, "checkpointing": {"save_period": 1000}})
    with Command("coordinator", "up", config) as up:
        up.wait_for(r"step 1/")
        run = tandem.load_run("run")
        assert run.state == "running"
        up.signal(signal.SIGINT)
        assert up.wait() == 130, up.output()
    assert run.state == tandem.load_run("run").state == "interrupted"
    assert "the run was interrupted\n" in run.log, "nothing is in a file: the console had it"
    assert not run.log_path.exists()
    assert repr(run) == "Run('run', interrupted)"
    with Command("coordinator", "up", config, "--resume") as up:
        up.wait_for(r"step \d+/")
        assert run.state == "running", "that it was interrupted is over"
        children = up.children()
        up.signal(signal.SIGKILL)
        up.wait()
        assert all_gone(children, 60.0) == []
    wait_until(lambda: run.state != "running", lambda: "the lock of the killed run to be gone")
    assert run.state == "ended", "it was killed, and recorded nothing"
