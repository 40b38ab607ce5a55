#!/usr/bin/env bash
# The published experiment on two MI300X, as a configuration: examples/mi300x/arm.sh hbm|dram|nvme [vLLM options …]
#
# Published (ATOM as a plug-in of vLLM, with LMCache, container rocm/atom-dev:vllm-latest): MiniMax-M2.5 in FP8, tensor
# parallel 2, 78 % of GPU memory, a CPU tier of 64 GB, chunks of 256 tokens, and an NVMe tier in the third arm. This is
# the same with kvserver in LMCache's place; it has not been run on that hardware. That container had vLLM 0.19.1, which is
# older than the oldest that is supported: use a ROCm build of vLLM 0.27.1, which ATOM's plug-in pins, for all arms
# (README.md). The load, one arm after the other:
#
#   python -m benchmarks.bench_vllm trace --preset mi300x --seed 42 --url ARM=http://localhost:8000
set -euo pipefail

arm=$1
shift
model=${MODEL:-MiniMaxAI/MiniMax-M2.5}
socket=${KVSERVER_SOCKET:-/run/kvserver/kvserver.sock}

server=(kvserver serve --socket "$socket" --arena-bytes 64GiB)
engine=(python -m vllm.entrypoints.openai.api_server --model "$model" --tensor-parallel-size 2 --kv-cache-dtype fp8
    --gpu-memory-utilization 0.78 --max-model-len 131072 --async-scheduling --enable-prefix-caching
    --enable-chunked-prefill --compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}')
# Fusions of ATOM that the experiment had on; they change neither what is cached nor how.
export AITER_QUICK_REDUCE_QUANTIZATION=INT4 ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION=1

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
