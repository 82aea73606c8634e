#!/usr/bin/env bash
# Find out what holds on a machine with a GPU: tests, benchmarks and a run, each part for ten minutes at most.
#
# Each part writes its log, and what it measures as JSON, to a folder, and then a line of summary.tsv: its name, its exit
# status (124: it took too long), its seconds. A part that has a line is not run again, so that the command can be
# repeated after it was stopped; remove a line to repeat that part. vLLM's parts come last, and are skipped without it.
#
# usage: [PYTHON=python] [PART_S=600] scripts/first_gpu_hour.sh FOLDER [part ...]     (default: all parts)
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n 's/^# \(usage.*\)/\1/p' scripts/first_gpu_hour.sh >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
python=${PYTHON:-python}
bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
summary=$folder/summary.tsv
touch "$summary"
export HF_HUB_OFFLINE=1

doctor() { "$bin/coordinator" doctor --json > "$folder/doctor.json"; }
transports() { tests tests/gpu/test_transports_cuda.py; }
digests() { tests tests/unit/test_digest_task.py tests/unit/test_gpu_kernel.py tests/gpu/test_numbers_cuda.py; }
waiting() { tests tests/gpu/test_waiting_cuda.py tests/gpu/test_offload_cuda.py; }
training() { tests tests/gpu/test_training_cuda.py tests/gpu/test_megatron_cuda.py; }
vision() { tests tests/gpu/test_vision_cuda.py; }
losses() { tests tests/gpu/test_lost_processes_cuda.py; }
clients() { tests tests/gpu/test_tinker_cuda.py; }
refit_speed() { benchmark benchmarks/test_refit_cuda.py; }
training_speed() { benchmark benchmarks/test_training_cuda.py; }
# A trainer on the GPU and an engine on the CPU: GRPO with two processes and no vLLM.
run() {
  mkdir -p "$folder/run"
  "$bin/coordinator" up examples/arithmetic.yaml grpo.max_num_steps=10 "logger.log_dir=$folder/run/log" \
    "checkpointing.checkpoint_dir=$folder/run/checkpoints" --restart
}
vllm() { tests tests/gpu/test_vllm_cuda.py; }
vllm_run() { tests tests/gpu/test_run_cuda.py; }
vllm_speed() { benchmark benchmarks/test_vllm_cuda.py; }

tests() { "$python" -m pytest -v -ra -p no:cacheprovider "$@"; }
benchmark() { "$python" -m pytest -s -p no:cacheprovider --benchmark-json "$folder/$part.json" "$@"; }

all=(doctor transports digests waiting training vision losses clients run refit_speed training_speed vllm vllm_run vllm_speed)
[ $# -gt 0 ] || set -- "${all[@]}"
for part in "$@"; do
  [[ " ${all[*]} " == *" $part "* ]] || { echo "$part is no part; the parts are: ${all[*]}" >&2; exit 2; }
done
export -f "${all[@]}" tests benchmark
export folder bin python part

for part in "$@"; do
  if grep -q "^$part"$'\t' "$summary"; then
    echo "$part: done before"
  elif [[ $part == vllm* ]] && ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
    echo "$part: skipped, vLLM is not installed"
  else
    started=$SECONDS
    timeout --kill-after=30 "${PART_S:-600}" bash -c "$part" > "$folder/$part.log" 2>&1
    status=$?
    printf '%s\t%s\t%s\n' "$part" "$status" "$((SECONDS - started))" >> "$summary"
    echo "$part: exit status $status after $((SECONDS - started)) s; $(tail -n 1 "$folder/$part.log")"
  fi
done
awk -F '\t' '$2 != 0 { failed = 1 } END { exit failed }' "$summary"
