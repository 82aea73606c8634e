"""Containers that Docker runs, and that end with the program that has started them."""

from __future__ import annotations

import json
import shutil
import subprocess

PORT = 8000
"""Where the server in an image of OpenEnv listens."""
_ANSWER_S = 30.0
_PULL_S = 480.0
_UNTIL_CLOSED = """
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
{ while read -r line <&3; do :; done; kill -9 $server; } &
wait $server
"""
"""The first process of a container, which ends it once its standard input is closed. Docker closes that when its client
ends, even by kill -9, and would keep the container otherwise."""


class ImageRefused(Exception):
    """The error of an image that cannot be run here, in one line."""


def compose_command(image: str, port: int, names: list[str]) -> list[str]:
    """Return the command that runs the server of an image at a port on loopback, for as long as its input is open.

    The image is pulled if it is not there. `names` are those of the variables that the server has from the command's
    environment. Raises `ImageRefused`.
    """
    words = _find_command(image)
    publish = ["--publish", f"127.0.0.1:{port}:{PORT}"]
    variables = [word for name in names for word in ("--env", name)]
    run = ["docker", "run", "--rm", "--interactive", *publish, *variables, "--entrypoint", "/bin/sh"]
    return [*run, image, "-c", _UNTIL_CLOSED, "sh", *words]


def _find_command(image: str) -> list[str]:
    """Return the command that an image runs."""
    if shutil.which("docker") is None:
        raise ImageRefused("image: docker is not installed")
    if reason := _run(_ANSWER_S, "version")[1]:
        raise ImageRefused(f"image: docker runs no containers here: {reason}")
    described, reason = _describe(image)
    if reason and not (reason := _run(_PULL_S, "pull", "--quiet", image)[1]):
        described, reason = _describe(image)
    if reason:
        raise ImageRefused(f"image: cannot run {image!r}: {reason}")
    config = json.loads(described)
    if not (words := [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]):
        raise ImageRefused(f"image: {image!r} has no command")
    return words


def _describe(image: str) -> tuple[str, str]:
    return _run(_ANSWER_S, "image", "inspect", "--format", "{{json .Config}}", image)


def _run(timeout_s: float, *words: str) -> tuple[str, str]:
    """Return what a command of Docker prints, and the last line about its failure, if it fails."""
    try:
        ended = subprocess.run(
            ["docker", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return "", f"{' '.join(words)} takes over {timeout_s:g} s"
    last = ([*ended.stderr.strip().splitlines()] or [f"exit code {ended.returncode}"])[-1]
    return ended.stdout, "" if ended.returncode == 0 else last
