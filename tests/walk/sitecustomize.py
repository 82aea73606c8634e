"""Take down which of Tandem's functions each process of a run executes, by the second.

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

if OUT:
    seen: dict[int, set[tuple[str, str]]] = {}

    def note(frame, event, argument):  # type: ignore[no-untyped-def]
        if event == "call":
            path = frame.f_code.co_filename
            if "/tandem/" in path:
                call = path.rsplit("/src/tandem/", 1)[-1], frame.f_code.co_qualname
                seen.setdefault(int(time.time()), set()).add(call)

    def write() -> None:
        path = os.path.join(OUT, f"{os.getpid()}.json")
        calls = {second: sorted(map(list, calls)) for second, calls in list(seen.items())}
        with open(f"{path}.new", "w") as file:
            json.dump({"process": sys.argv[:1], "calls": calls}, file)
        os.replace(f"{path}.new", path)  # whole, whenever the process is killed

    def write_now_and_then() -> None:
        while True:
            time.sleep(PERIOD_S)
            write()

    def begin() -> None:
        seen.clear()
        threading.setprofile(note)
        sys.setprofile(note)
        threading.Thread(target=write_now_and_then, daemon=True).start()

    begin()
    atexit.register(write)
    os.register_at_fork(after_in_child=begin)
