#!/usr/bin/env bash
# kvserver and an OpenAI-compatible vLLM server beside it: examples/vllm/serve.sh MODEL [vLLM options …]
set -euo pipefail

model=$1
shift
socket=${KVSERVER_SOCKET:-/tmp/kvserver/kv.sock}

kvserver serve --socket "$socket" --arena-bytes "${KVSERVER_ARENA_BYTES:-4GiB}" &
trap 'kill $!' EXIT

python -m vllm.entrypoints.openai.api_server --model "$model" --kv-transfer-config '{
  "kv_connector": "KvServerConnector",
  "kv_connector_module_path": "kvclient.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"socket": "'"$socket"'"}}' "$@"
