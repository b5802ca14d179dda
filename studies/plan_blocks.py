"""How many K/V blocks vLLM makes of a budget, against the plan, on a CPU: run it with the Python of vLLM's environment.

    VLLM/bin/python studies/plan_blocks.py --output results/plan/MACHINE.json

Each configuration is started once, in a process of its own, with 256 MiB of K/V; nothing is generated. Those of `TINY` have random
weights: only their shapes matter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parents[1]
KV_BYTES = 256 << 20
MAX_LEN = 2048
MARK = "FOUND "
BASE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**BASE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "deepseek_v2": {**BASE, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 8,
                    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
                    "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "moe_layer_freq": 1},
    "gemma3_text": {**BASE, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6,
                    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "query_pre_attn_scalar": 32},
}  # fmt: skip


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> {model, draft, method, dummy}."""
    smollm2, head = resolve("smollm2-135m"), str(ROOT / "speculators" / "smollm2-135m-eagle3")
    found: dict[str, dict[str, Any]] = {
        "smollm2": {"model": smollm2},
        "smollm2 with itself as a draft": {"model": smollm2, "draft": smollm2, "method": "draft_model"},
        "smollm2 with an EAGLE-3 head": {"model": smollm2, "draft": head, "method": "eagle3"},
    }
    for name, config in TINY.items():
        directory = folder / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        found[f"tiny {name}"] = {"model": str(directory), "dummy": True}
    return found


def resolve(name: str) -> str:
    from headway.models import hub

    return str(hub.resolve(name))


def started(case: dict[str, Any]) -> dict[str, Any]:
    """In vLLM: its blocks, and the tokens and requests that it prints."""
    from vllm import LLM

    speculative = {"method": case["method"], "model": case["draft"], "num_speculative_tokens": 4} if "draft" in case else None
    llm = LLM(
        case["model"], dtype="bfloat16", max_model_len=MAX_LEN, max_num_seqs=16, enforce_eager=True, kv_cache_memory_bytes=KV_BYTES,
        speculative_config=speculative, load_format="dummy" if case.get("dummy") else "auto", skip_tokenizer_init=bool(case.get("dummy")),
    )  # fmt: skip
    cache = llm.llm_engine.vllm_config.cache_config
    return {"num_blocks": cache.num_gpu_blocks, "block_size": cache.block_size, "num_tokens": getattr(cache, "kv_cache_size_tokens", None)}


def planned(case: dict[str, Any], block_size: int) -> dict[str, Any]:
    from headway.plan import configs, drafting, families, memory
    from headway.plan.device import Device

    target = families.read(configs.find(case["model"]), "target")
    each = None
    if "draft" in case:
        raw = configs.find(case["draft"])
        draft = families.read(raw, "draft") if case["method"] == "draft_model" else None
        each = drafting.build(case["method"], target, raw, case["draft"], draft, 4)
    device = Device("a budget", 0.0, 1.0, {"bf16": 1.0}, 1.0, 0.0, "", is_cpu=True)
    deployment = memory.Deployment(device, block_size=block_size, utilization=1.0)
    [empty] = memory.measure(target, each, None, deployment, 0, MAX_LEN).devices
    budget = replace(deployment, device=replace(device, memory_bytes=empty.taken + KV_BYTES))
    found = memory.measure(target, each, None, budget, 0, MAX_LEN)
    return {"num_tokens": found.num_tokens, "bytes_per_token": empty.kv_per_token + empty.draft_kv_per_token}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", type=json.loads, help="start vLLM with this one and print what it has")
    args = parser.parse_args()
    if args.case:
        print(MARK + json.dumps(started(args.case)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(Path(folder)).items():
            rows.append({"case": name, **compared(case)})
            print(json.dumps(rows[-1]), flush=True)
    import vllm

    document = {"benchmark": "plan_blocks", "vllm": vllm.__version__, "kv_bytes": KV_BYTES, "rows": rows, **record.origin()}
    record.publish(document, args.output)


def compared(case: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--case", json.dumps(case)], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        wrong = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"failed": (wrong or ["no output"])[-1][-300:]}
    vllm = json.loads(lines[0].removeprefix(MARK))
    plan = planned(case, vllm["block_size"])
    return {"vllm": vllm, "plan": plan, "ratio": plan["num_tokens"] / vllm["num_tokens"]}


if __name__ == "__main__":
    main()
