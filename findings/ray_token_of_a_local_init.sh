#!/usr/bin/env bash
# Ray 2.60.0: one local `ray.init()` leaves a token, and from then on `ray start` cannot add a node to a cluster.
#
# Behaviour: without RAY_AUTH_MODE, `ray start --head` and `ray start --address=...` make a cluster without
# authentication. A program that calls `ray.init()` with no cluster around writes `~/.ray/auth_token`. The next
# `ray start --head` of that user finds the file and demands the token, while `ray start --address=...`, with the same
# file in the same home, sends none: the error says that RAY_AUTH_MODE "is currently 'disabled'".
# Surprise: the same two commands work in a fresh account and fail for ever after a script was run there once. Nothing
# that was typed has changed, and the file that the message asks for is where it says.
# Seen:
#   before: the head starts, the second node joins
#   a local ray.init() has left .ray/auth_token
#   after: the head starts, the second node is refused: AuthenticationError
set -euo pipefail
folder=$(mktemp -d /tmp/ray.XXXXXX)
export HOME=$folder
unset RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH
end_nodes() { # `ray stop` would end those of others, too
  while pkill -9 -f "$folder/(packages/ray|r)/"; do sleep 0.5; done
}
trap 'end_nodes; rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" ray==2.60.0
export PYTHONPATH=$folder/packages
cd "$folder"

common=(--node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=83886080 --disable-usage-stats)
add_node() { python3 -m ray.scripts.scripts start --address=127.0.0.1:26379 "${common[@]}" > "$1" 2>&1; }
start_head() {
  python3 -m ray.scripts.scripts start --head --port=26379 --include-dashboard=false --temp-dir="$folder/r" "${common[@]}" > "$1" 2>&1
}

start_head head_before && add_node node_before || { cat head_before node_before; exit 1; }
end_nodes
echo "before: the head starts, the second node joins"

python3 -c 'import ray; ray.init(num_cpus=1, include_dashboard=False, object_store_memory=83886080); ray.shutdown()' \
  > init 2>&1 || { cat init; exit 1; }
test -s .ray/auth_token && echo "a local ray.init() has left .ray/auth_token"

start_head head_after || { cat head_after; exit 1; }
if add_node node_after; then
  echo "the behaviour has changed"
  exit 1
fi
grep -q "AuthenticationError.*currently 'disabled'" node_after || { cat node_after; exit 1; }
echo "after: the head starts, the second node is refused: AuthenticationError"
