#!/usr/bin/env bash
# kvserver, two vLLM servers on GPUs of their own, and the proxy before them: examples/pd/serve.sh MODEL [vLLM options …]
# PREFILL_GPUS=0,1 PREFILL_OPTIONS='--max-num-batched-tokens 8192', and the same with DECODE, set the two apart.
set -euo pipefail

model=$1
shift
socket=${KVSERVER_SOCKET:-/tmp/kvserver/kv.sock}
trap 'kill $(jobs -p)' EXIT

kvserver serve --socket "$socket" --arena-bytes "${KVSERVER_ARENA_BYTES:-64GiB}" &

# engine GPUS PORT OPTIONS…  Both have the role kv_both: each also finds what the other computed in earlier turns.
engine() {
    CUDA_VISIBLE_DEVICES=$1 exec python -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "$2" \
        --kv-transfer-config '{
  "kv_connector": "KvServerConnector",
  "kv_connector_module_path": "kvclient.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"socket": "'"$socket"'"}}' "${@:3}"
}

# The options are split at spaces on purpose.
engine "${PREFILL_GPUS:-0}" 8100 ${PREFILL_OPTIONS:-} "$@" &
engine "${DECODE_GPUS:-1}" 8200 ${DECODE_OPTIONS:-} "$@" &
python "$(dirname "$0")/proxy.py" --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" &
wait $!
