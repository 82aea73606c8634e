#!/usr/bin/env bash
# huggingface_hub 2.4.0 raises errors of the package `httpx2`: code that catches those of `httpx` no longer does.
#
# Behaviour: from release 2 on, the Hub's client asks for `httpx2` in the place of `httpx`. A server that cannot be
# reached is then a `httpx2.ConnectError`, which no class of `httpx` is a base of, even where `httpx` is installed too.
# huggingface_hub 1.33.0 raises `httpx.ConnectError` for the same call.
# Surprise: an application that handles an unreachable mirror by `except httpx.HTTPError` works until the client is
# updated, and then ends with a traceback. Both packages are installed next to each other without a conflict.
# Seen:
#   huggingface_hub 1.33.0: httpx.ConnectError, caught by httpx.HTTPError: True
#   huggingface_hub 2.4.0: httpx2.ConnectError, caught by httpx.HTTPError: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for release in 1.33.0 2.4.0; do
  python3 -m pip install --quiet --target "$release" "huggingface_hub==$release" httpx==0.28.1
done

for release in 1.33.0 2.4.0; do
  PYTHONPATH=$release HF_ENDPOINT=http://127.0.0.1:9 HF_HUB_OFFLINE=0 HF_HOME=$folder/home python3 <<'PYTHON'
import huggingface_hub
import httpx

release = huggingface_hub.__version__
try:
    huggingface_hub.HfApi().model_info("org/model")
except Exception as error:
    kind = type(error)
else:
    raise AssertionError("nothing listens there")
package = kind.__module__.partition(".")[0]
is_caught = issubclass(kind, httpx.HTTPError)
print(f"huggingface_hub {release}: {package}.{kind.__name__}, caught by httpx.HTTPError: {is_caught}")
expected = ("httpx", True) if release.startswith("1.") else ("httpx2", False)
assert (package, is_caught) == expected, "the behaviour has changed"
PYTHON
done
