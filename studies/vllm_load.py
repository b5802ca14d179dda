"""`vllm bench serve`, many times in one process: importing vLLM takes longer than most runs. Runs in vLLM's environment.

Reads one JSON list of the command's words per line, answers each with one line: RESULT and the command's result as JSON.
"""

from __future__ import annotations

import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

KEPT = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "output_throughput", "mean_ttft_ms", "median_ttft_ms",
    "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "spec_decode_acceptance_rate", "spec_decode_acceptance_length",
)  # fmt: skip

for line in sys.stdin:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    result = main(parser.parse_args(json.loads(line)))
    print("RESULT " + json.dumps({key: result[key] for key in KEPT if key in result}), flush=True)
