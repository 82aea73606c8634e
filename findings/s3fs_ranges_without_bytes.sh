#!/usr/bin/env bash
# s3fs 2026.9.0: a range of no bytes is the whole object, and a range of an empty object is an error (moto 5.2.5).
#
# Behaviour: `cat_file(path, start=0, end=0)` of fsspec's interface asks S3 for the object without a range and returns
# all of it. `cat_file(path, start=0, end=8)` of an object that has no bytes raises `OSError` 22, since S3 answers that
# the range cannot be satisfied; of a shorter object that has some, it returns those.
# Surprise: fsspec's other file systems, a local folder and memory, return no bytes in both cases. A reader that asks for
# ranges of computed lengths (a column of no rows, a shard of no elements) gets a file's contents in the place of
# nothing, and one that reads at most so many bytes of an object ends with an error where an empty file is fine.
# Seen:
#   file: 0 to 0 of 3 bytes is b'', 0 to 8 of none is b'', 0 to 8 of 3 is b'abc'
#   memory: 0 to 0 of 3 bytes is b'', 0 to 8 of none is b'', 0 to 8 of 3 is b'abc'
#   s3: 0 to 0 of 3 bytes is b'abc', 0 to 8 of none is OSError 22, 0 to 8 of 3 is b'abc'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" \
  s3fs==2026.9.0 fsspec==2026.9.0 'moto[s3]==5.2.5' 'flask>=3' 'flask-cors>=5'
cd "$folder"

PYTHONPATH=packages AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_DEFAULT_REGION=us-east-1 python3 <<'PYTHON'
import logging

import fsspec
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
systems = {
    "file": (fsspec.filesystem("file"), "here"),
    "memory": (fsspec.filesystem("memory"), "/here"),
    "s3": (fsspec.filesystem("s3", endpoint_url=f"http://{host}:{port}"), "here"),
}


def read(files, path, start, end):
    try:
        return files.cat_file(path, start=start, end=end)
    except OSError as error:
        return f"OSError {error.errno}"


seen = {}
for name, (files, root) in systems.items():
    files.mkdir(root)
    files.pipe_file(f"{root}/some", b"abc")
    files.pipe_file(f"{root}/none", b"")
    got = read(files, f"{root}/some", 0, 0), read(files, f"{root}/none", 0, 8), read(files, f"{root}/some", 0, 8)
    seen[name] = got
    print("{}: 0 to 0 of 3 bytes is {}, 0 to 8 of none is {}, 0 to 8 of 3 is {}".format(name, *got))
server.stop()
nothing = (b"", b"", b"abc")
assert seen == {"file": nothing, "memory": nothing, "s3": (b"abc", "OSError 22", b"abc")}, "the behaviour has changed"
PYTHON
