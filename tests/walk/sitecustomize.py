"""Take down which of Tandem's functions each process of a run executes, and when, in parts of `PART_S`.

A run whose PYTHONPATH begins with this folder, and whose environment has WALK_OUT, writes a JSON file a process there.
Slow: it is for counting, never for timing.
"""

import atexit
import json
import os
import sys
import threading
import time

OUT = os.environ.get("WALK_OUT")
PERIOD_S = 0.5
PART_S = 0.05

if OUT:
    seen: dict[int, set[tuple[str, str]]] = {}

    def note(frame, event, argument):  # type: ignore[no-untyped-def]
        if event == "call":
            path = frame.f_code.co_filename
            if "/tandem/" in path:
                call = path.rsplit("/src/tandem/", 1)[-1], frame.f_code.co_qualname
                seen.setdefault(int(time.time() / PART_S), set()).add(call)

    def write() -> None:
        path = os.path.join(OUT, f"{os.getpid()}.json")
        calls = {part: sorted(map(list, calls)) for part, calls in list(seen.items())}
        temporary = f"{path}.{threading.get_ident()}"  # at the end a second thread writes
        with open(temporary, "w") as file:
            json.dump({"process": sys.argv[:1], "calls": calls}, file)
        os.replace(temporary, path)  # whole, whenever the process is killed

    def write_now_and_then() -> None:
        while True:
            time.sleep(PERIOD_S)
            write()

    def begin() -> None:
        seen.clear()
        threading.setprofile(note)
        sys.setprofile(note)
        threading.Thread(target=write_now_and_then, daemon=True).start()

    atexit.register(write)
    os.register_at_fork(after_in_child=begin)
    # A fork server only imports, which takes several times as long where each call is noted: it would be given up.
    if "tandem.launch.fork_server" not in sys.orig_argv:
        begin()
