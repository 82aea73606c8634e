"""Images of an interpreter of this machine, made without a network: its files, a shell, and folders by name."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

BUILD_S = 300.0
_LIST_PATHS = "import json, sys, sysconfig; print(json.dumps([sysconfig.get_path('stdlib'), sys.path]))"


def make_image(name: str, python: str, folders: Mapping[str, Path], words: list[str]) -> None:
    """Have Docker import an image whose command is the interpreter with these words.

    What the interpreter imports is in ``/site``, and `folders` are at their names, such as ``app/package``.
    """
    listed = subprocess.run([python, "-c", _LIST_PATHS], capture_output=True, text=True, check=True, timeout=BUILD_S)
    library, paths = json.loads(listed.stdout)
    (site,) = [Path(path).resolve() for path in paths if path.endswith("site-packages")]
    program = Path(python).resolve()
    binaries = [program, Path("/bin/sh"), *Path(library, "lib-dynload").glob("*.so"), *site.rglob("*.so")]
    printed = subprocess.run(["ldd", *binaries], capture_output=True, text=True, timeout=BUILD_S).stdout
    libraries = {path for path in re.findall(r"(/\S+) \(0x", printed) if not Path(path).resolve().is_relative_to(site)}
    changes = [f"CMD {json.dumps([str(program), *words])}", "ENV PYTHONPATH=/site:/app", "WORKDIR /app"]
    command = ["docker", "import", *(word for change in changes for word in ("--change", change)), "-", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as importing:
        assert importing.stdin is not None
        with tarfile.open(fileobj=importing.stdin, mode="w|") as archive:
            for path in sorted({*libraries, "/bin/sh", str(program)}):
                archive.add(Path(path).resolve(), path.lstrip("/"))
            archive.add(library, library.lstrip("/"), filter=leave_out)
            archive.add(site, "site", filter=leave_out)
            for path, folder in folders.items():
                archive.add(folder, path, filter=leave_out)
        importing.stdin.close()
    assert importing.returncode == 0


def leave_out(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return a member of an archive; None for compiled files, tests, and packages that are added apart."""
    parts = Path(member.name).parts
    is_left_out = "__pycache__" in parts or "test" in parts[:-1] or ("site-packages" in parts and parts[0] != "site")
    return None if is_left_out else member
