"""Run the file of one server of NeMo Gym, without a cluster of Ray that it may never use.

Each server would begin one, or join one, as it starts. Ray begins by itself where a server calls it first.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run the file that the first argument names, in the working directory, as a program."""
    from nemo_gym import server_utils

    server_utils.initialize_ray = lambda: None
    sys.path[0] = os.getcwd()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
