#!/usr/bin/env bash
# lm-eval 0.4.13 ends with a TypeError on the command that its own README has for an OpenAI-compatible server.
#
# Behaviour: the README puts `batch_size=16` among the arguments of the model; the command line always gives the model
# a batch size of its own, and both reach its constructor.
# Surprise: the option `--batch_size 16` works, so the message, about two values of which the user gave one, does not
# lead there. A user of the documented command evaluates nothing.
# Seen:
#   the README: ...,tokenized_requests=False,batch_size=16
#   TypeError: ...LocalCompletionsAPI() got multiple values for keyword argument 'batch_size'
#   with --batch_size 16 instead: the model is made
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" 'lm-eval[api]==0.4.13'
cd "$folder"
mkdir tasks
echo '{"question": "1+1=", "answer": "2"}' > rows.jsonl
cat > tasks/sums.yaml <<YAML
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: $folder/rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match}]
YAML
export PYTHONPATH=packages HF_HUB_OFFLINE=1 HF_DATASETS_CACHE=$folder/cache

# Nothing listens at this address: the model is made without a server, and requests to it would be the next step.
evaluate() {
  python3 -m lm_eval run --model local-completions --tasks sums --include_path tasks --limit 0 "$@" 2>&1 || true
}
arguments=model=m,base_url=http://127.0.0.1:9/v1/completions,tokenizer_backend=None,tokenized_requests=False
readme=$(grep -o 'tokenized_requests=False,batch_size=16' packages/lm_eval-0.4.13.dist-info/METADATA)
echo "the README: ...,$readme"
refusal=$(evaluate --model_args "$arguments,batch_size=16" | grep TypeError)
echo "$refusal"
grep -q "got multiple values for keyword argument 'batch_size'" <<< "$refusal"
made=$(evaluate --batch_size 16 --model_args "$arguments")
grep -q "Using tokenizer" <<< "$made"
if grep -q TypeError <<< "$made"; then exit 1; fi
echo "with --batch_size 16 instead: the model is made"
