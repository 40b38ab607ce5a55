"""The same prompt twice, the second time from the server's memory.

kvserver serve --socket /tmp/kvserver/kv.sock --arena-bytes 4GiB &
python examples/vllm/offline.py --socket /tmp/kvserver/kv.sock --model MODEL [--engine '{"enforce_eager": true}']
"""

import argparse
import json
import time

import vllm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: further arguments of vllm.LLM")
    parser.add_argument("--connector", type=json.loads, default={}, help="JSON: more of kv_connector_extra_config")
    options = parser.parse_args()
    llm = vllm.LLM(
        model=options.model,
        kv_transfer_config={
            "kv_connector": "KvServerConnector",
            "kv_connector_module_path": "kvclient.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": options.socket, **options.connector},
        },
        **options.engine,
    )
    prompt = "A cache is a place where things are kept that will be wanted again. " * 60
    for turn in ("computed", "from the server"):
        began_s = time.perf_counter()
        (output,) = llm.generate([prompt], vllm.SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        took_ms = (time.perf_counter() - began_s) * 1000
        print(f"{turn}: {took_ms:.0f} ms, {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached")
        while not llm.reset_prefix_cache():  # the engine's own; what is being stored is held a moment longer
            time.sleep(0.05)


if __name__ == "__main__":
    main()
