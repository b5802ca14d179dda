"""What a process holds at most: weights, the K/V pool, and less than a GiB beside them."""

from __future__ import annotations

import json
import subprocess
import sys

COMMAND = (
    "bench", "throughput", "smollm2-135m", "--dtype", "bfloat16", "--device", "cpu", "--kv-cache-memory-bytes", str(256 << 20),
    "--max-model-len", "1024", "--workload", "chat", "--num-prompts", "16", "--concurrency", "16", "--output-len", "4", "--warmup", "0",
    "--no-profile",
)


def test_peak_memory_of_sixteen_requests() -> None:
    run = "import sys; from headway.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", run, *COMMAND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"peak {result['peak_memory_bytes'] / 2**20:.0f} MiB, weights {result['roofline']['weight_bytes'] / 2**20:.0f}, "
          f"pool {result['kv_cache_bytes'] / 2**20:.0f}")
    assert result["peak_memory_bytes"] <= result["roofline"]["weight_bytes"] + result["kv_cache_bytes"] + (1 << 30)
