#!/usr/bin/env bash
# The published experiment on two MI300X: [LOAD=stress|base] examples/mi300x/arm.sh hbm|dram|nvme [vLLM options …]
#
# README.md says what was published, what differs here, and how to send the load. Never run on that hardware.
set -euo pipefail

arm=$1
shift
model=${MODEL:-MiniMaxAI/MiniMax-M2.5}
socket=${KVSERVER_SOCKET:-/run/kvserver/kvserver.sock}

case ${LOAD:-stress} in
    stress) gpu_memory=0.78 ;;  # 32 users, 100K tokens, 20 minutes
    base) gpu_memory=0.85 ;;    # 8 users, 32K tokens, 10 minutes
    *) echo "$0: LOAD=$LOAD is none of stress, base" >&2; exit 2 ;;
esac

server=(kvserver serve --socket "$socket" --arena-bytes "${KVSERVER_ARENA_BYTES:-64GiB}")
engine=(python -m vllm.entrypoints.openai.api_server --model "$model" --tensor-parallel-size 2 --kv-cache-dtype fp8
    --gpu-memory-utilization "$gpu_memory" --max-model-len 131072 --max-num-batched-tokens 16384 --async-scheduling
    --enable-prefix-caching --enable-chunked-prefill --trust-remote-code
    --enable-auto-tool-choice --tool-call-parser minimax_m2 --reasoning-parser minimax_m2_append_think
    --compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}')
# The last two are fusions of ATOM; they change neither what is cached nor how.
export VLLM_FLOAT32_MATMUL_PRECISION=high AITER_QUICK_REDUCE_QUANTIZATION=INT4
export ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION=1

case $arm in
    hbm) exec "${engine[@]}" "$@" ;;  # no connector, no server
    dram) ;;
    nvme) server+=(--disk-paths "${KVSERVER_DISKS:?directories on NVMe, with commas between them}" --disk-bytes 1TiB) ;;
    *) echo "$0: $arm is none of hbm, dram, nvme" >&2; exit 2 ;;
esac

"${server[@]}" &
trap 'kill $!' EXIT
"${engine[@]}" --kv-transfer-config '{
  "kv_connector": "KvServerConnector",
  "kv_connector_module_path": "kvclient.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"socket": "'"$socket"'", "chunk_tokens": 256}}' "$@"
