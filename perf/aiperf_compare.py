"""Our formulas over the per-request records of an `aiperf` run, beside aiperf's own summary of them.

    aiperf profile --model M --url URL --endpoint-type chat --streaming --tokenizer DIR --request-count 24 --concurrency 3 \\
        --export-level records --artifact-dir DIR
    python -m graphrt.perf.aiperf_compare DIR [--out perf/results/aiperf-compare.json]

aiperf calls TPOT `inter_token_latency` and the gaps between events `inter_chunk_latency`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from graphrt.perf.bench_stats import RequestRecord, summarise
from graphrt.perf.machine import machine_facts

NAMES = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "inter_token_latency",
    "itl_ms": "inter_chunk_latency",
    "e2e_ms": "request_latency",
}
FIGURES = {"mean": "avg", "p50": "p50", "p90": "p90", "p99": "p99", "max": "max"}
RATES = {"requests_per_s": "request_throughput", "output_tokens_per_s": "output_token_throughput"}


def read_record(line: dict[str, Any]) -> RequestRecord:
    """One line of `profile_export.jsonl`; times in seconds."""
    meta, metrics = line["metadata"], {name: m["value"] for name, m in line["metrics"].items()}
    start = meta["request_start_ns"] / 1e9
    events = [start + metrics["time_to_first_token"] / 1e3]
    for gap in metrics["inter_chunk_latency"]:
        events.append(events[-1] + gap / 1e3)
    return RequestRecord(
        start,
        meta["request_end_ns"] / 1e9,
        events,
        int(metrics["input_sequence_length"]),
        int(metrics["output_sequence_length"]),
        200,
    )


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{figure: ours, aiperf's, difference in per cent}."""
    pairs = {
        f"{our} {figure}": (ours[our][figure], theirs[name][their])
        for our, name in NAMES.items()
        for figure, their in FIGURES.items()
    }
    pairs |= {our: (ours[our], theirs[name]["avg"]) for our, name in RATES.items()}
    return {
        key: {"graphrt": a, "aiperf": round(b, 3), "difference_percent": round((a / b - 1) * 100, 3)}
        for key, (a, b) in pairs.items()
    }


def main(argv: list[str]) -> int:
    """Exit code 1 when a figure differs by more than one per cent."""
    parser = argparse.ArgumentParser(prog="python -m graphrt.perf.aiperf_compare", description=__doc__)
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    lines = (args.artifacts / "profile_export.jsonl").read_text().splitlines()
    records = [read_record(json.loads(line)) for line in lines]
    figures = compare(summarise(records, {}), json.loads((args.artifacts / "profile_export_aiperf.json").read_text()))
    worst = max(abs(f["difference_percent"]) for f in figures.values())
    result = {
        "requests": len(records),
        "worst_difference_percent": worst,
        "figures": figures,
        "machine": machine_facts(()),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
