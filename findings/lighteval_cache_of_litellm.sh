#!/usr/bin/env bash
# lighteval 0.13.0, its newest release, cannot ask an endpoint with litellm from 1.109 on.
#
# Behaviour: `lighteval[litellm]` takes any litellm from 1.66 on, and its model of endpoints sets litellm's cache to
# `LiteLLMCacheType.DISK` when it is imported. litellm 1.109 removed that kind of cache.
# Surprise: a plain `pip install 'lighteval[litellm]'` today has a `lighteval endpoint litellm` that ends with an
# AttributeError before it reads its arguments; nothing in the error speaks of versions.
# Seen (lighteval's own statement, run with each litellm):
#   litellm 1.108.14: the cache is made
#   litellm 1.110.2: AttributeError: DISK
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-deps --target lighteval lighteval==0.13.0 2> /dev/null
cat > cache.py <<'PY'
import ast
from importlib.metadata import version
from pathlib import Path

import litellm
from litellm.caching.caching import Cache, LiteLLMCacheType

source = Path("lighteval/lighteval/models/endpoints/litellm_model.py").read_text()
(statement,) = (
    node
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "litellm.cache"
)
try:
    exec(compile(ast.Module([statement], []), "litellm_model.py", "exec"))
    outcome = "the cache is made"
except AttributeError as error:
    outcome = f"AttributeError: {error}"
print(f"litellm {version('litellm')}: {outcome}")
PY
for release in 1.108.14 1.110.2; do
  venv/bin/pip install --quiet "litellm==$release" diskcache 2> /dev/null
  venv/bin/python -W ignore cache.py 2> /dev/null | tee -a seen
done
diff seen - <<'SEEN'
litellm 1.108.14: the cache is made
litellm 1.110.2: AttributeError: DISK
SEEN
