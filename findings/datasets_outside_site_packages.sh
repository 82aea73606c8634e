#!/usr/bin/env bash
# datasets 5.2.0 with dill 0.4.1 fails to make any data set when its packages lie in a folder not called site-packages.
#
# Behaviour: `Dataset.from_dict` hashes its table with dill, which pickles a module by name if its path lies under the
# interpreter's own folders or contains "site-packages", and by content otherwise. pyarrow is then pickled by content,
# which ends in a PicklingError. The same files in a folder called site-packages work.
# Surprise: `pip install --target` and PYTHONPATH are a common way to ship packages (zip layers, cluster jobs), every
# import works, and the error names a class of pyarrow and not the place. The name of a folder decides.
# Seen:
#   in packages: PicklingError
#   in site-packages: 1 row
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" datasets==5.2.0 pyarrow==26.0.1 dill==0.4.1
cd "$folder"

cat >make.py <<'PYTHON'
import sys
import warnings
from pickle import PicklingError

warnings.simplefilter("ignore")
import datasets

try:
    outcome = f"{len(datasets.Dataset.from_dict({'text': ['a']}))} row"
except PicklingError as error:
    outcome = type(error).__name__
print(f"in {sys.argv[1]}: {outcome}")
PYTHON
HF_HUB_OFFLINE=1 PYTHONPATH=packages python3 make.py packages | tee seen.txt
mv packages site-packages
HF_HUB_OFFLINE=1 PYTHONPATH=site-packages python3 make.py site-packages | tee -a seen.txt
diff seen.txt - <<'SEEN' || { echo "the behaviour has changed" >&2; exit 1; }
in packages: PicklingError
in site-packages: 1 row
SEEN
