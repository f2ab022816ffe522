"""The standing benchmark: what adapters cost on this machine, in ten minutes on two cores.

    python benchmarks/standing.py            # measure, append to docs/benchmarks/standing.jsonl, redraw the tables
    python benchmarks/standing.py --tables   # only redraw the tables from what is recorded

SmolLM2-135M in bf16, 64 requests of 64 + 64 tokens under 64 different adapters, eager; base, LoRAP and DiReFTP in three
repeats; all-token LoRA, the compiled base and compiled LoRAP in one. `make bench` runs it; the first time it also
compiles, for a minute or two. Nothing else should run meanwhile; a record
says whether something did, and the README shows the last one of a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "benchmarks" / "standing.jsonl"
HISTORY = ROOT / "docs" / "benchmarks" / "standing.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- standing benchmark: begin, written by `make bench` -->", "<!-- standing benchmark: end -->"
QUIET_CORES = 0.25
NAMES = {
    "base-compiled": "stock vLLM base, compiled",
    "base": "stock vLLM base, eager",
    "base-preft": "base requests on this engine",
    "direftp": "DiReFTP, rank 8, all layers",
    "lorap-compiled": "LoRAP, rank 16, compiled",
    "lorap": "LoRAP, rank 16, all linear modules",
    "lora": "all-token LoRA on this engine",
    "stock-lora": "stock vLLM multi-LoRA",
}
CALL = {
    "--arms": "base,lorap,direftp,lora,base-compiled,lorap-compiled",
    "--once": "lora,base-compiled,lorap-compiled",
    "--adapters": "64",
    "--slots": "64",
    "--rank": "16",
    "--direft-rank": "8",
    "--input-len": "64",
    "--output-len": "64",
    "--requests": "64",
    "--repeats": "3",
    "--warm-runs": "1",
    "--dtype": "bfloat16",
    # A machine much slower than two cores ends with fewer rows, not hours later.
    "--arm-limit-s": "240",
}
KEPT = (
    "arm",
    "kind",
    "adapters",
    "lora_rank",
    "repeats",
    "output_tokens_per_s",
    "ratio_to_base",
    "ratio_to_base_compiled",
    "ratio_to_lora",
    "prefill_s",
    "decode_s",
    "adapter_prefill_share",
    "adapter_decode_share",
    "itl_s_p50",
    "itl_s_p99",
    "peak_rss_bytes",
    "other_busy_cores",
)


def record_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept of one run: its set-up, and the figures of each arm."""
    from preft.bench.summary import summarise

    setup = rows[0]["setup"]
    entries = [{key: entry[key] for key in KEPT} for entry in summarise([dict(row) for row in rows])]
    kept = (
        "created",
        "versions",
        "machine",
        "model",
        "slots",
        "direft_rank",
        "input_len",
        "output_len",
        "dtype",
        "mode",
    )
    return {
        **{key: setup[key] for key in kept},
        "requests": rows[0]["requests"],
        "partial": any(row["partial"] for row in rows),
        "quiet": all(entry["other_busy_cores"] <= QUIET_CORES for entry in entries),
        "arms": entries,
    }


def read_records(path: Path = RECORDS) -> list[dict[str, Any]]:
    """All records, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def readme_table(records: Sequence[Mapping[str, Any]]) -> str:
    """The README's table: of the last whole run on a quiet machine, or else of the last run, and then it says so."""
    if not records:
        return "Not measured yet: `make bench` fills in this table.\n"
    good = [record for record in records if record["quiet"] and not record["partial"]]
    shown = (good or list(records))[-1]
    machine, versions = shown["machine"], shown["versions"]
    workload = f"{shown['requests']} requests of {shown['input_len']} + {shown['output_len']} tokens"
    adapters = shown["arms"][0]["adapters"]
    lines = [
        f"SmolLM2-135M in {shown['dtype']}, {workload} under {adapters} different adapters, {shown['slots']} slots; "
        f"{machine['processor']}, {machine['cores']} cores; preft {versions['preft']}, {shown['created'][:10]}.",
        *(
            []
            if good
            else ["", "**Other processes were running, or arms are missing: no figure here can be trusted.**"]
        ),
        "",
        "| arm | tokens/s | of eager base | of compiled base | over all-token LoRA | adapters' share of decode |",
        "|---|---|---|---|---|---|",
    ]
    arms = {entry["kind"]: entry for entry in shown["arms"]}
    lines += ["| " + " | ".join(_cells(arms[kind])) + " |" for kind in NAMES if kind in arms]
    return "\n".join(lines) + "\n"


def _cells(entry: Mapping[str, Any]) -> list[str]:
    from preft.bench.page import ratio_text, share_text

    speed = entry["output_tokens_per_s"]["median"]
    ratios = [entry[key] for key in ("ratio_to_base", "ratio_to_base_compiled", "ratio_to_lora")]
    cells = [f"{speed:.0f}" if speed else "-", *(ratio_text(ratio) for ratio in ratios)]
    return [NAMES[entry["kind"]], *(cell if cell != "-" else "" for cell in cells), _share(entry, share_text)]


def _share(entry: Mapping[str, Any], text: Any) -> str:
    return "" if entry["kind"].startswith("base") else text(entry["adapter_decode_share"])


def history(records: Sequence[Mapping[str, Any]]) -> str:
    """The page of all runs, newest first."""
    lines = [
        "# The standing benchmark",
        "",
        "What `make bench` measured, newest first; the whole records are in `standing.jsonl`. Rows of different",
        "machines are not comparable, nor are those of a machine that was busy.",
        "",
        "| date | preft | machine | quiet | arm | n | tokens/s | of eager base | prefill s | decode s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    from preft.bench.page import number_text, ratio_text

    for record in reversed(records):
        machine = f"{record['machine']['processor']}, {record['machine']['cores']} cores"
        state = "partial" if record["partial"] else "yes" if record["quiet"] else "no"
        for entry in record["arms"]:
            cells = [record["created"][:16], record["versions"]["preft"], machine, state, entry["arm"]]
            cells += [str(entry["repeats"]), number_text(entry["output_tokens_per_s"]["median"], digits=0)]
            cells += [ratio_text(entry["ratio_to_base"]), number_text(entry["prefill_s"], digits=2)]
            lines.append("| " + " | ".join([*cells, number_text(entry["decode_s"], digits=2)]) + " |")
    return "\n".join(lines) + "\n"


def replaced(text: str, table: str) -> str:
    """A text with the table between its markers replaced."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the README has no `{BEGIN}` ... `{END}`")
    return f"{head}{BEGIN}\n\n{table}\n{END}{tail}"


def redraw(records: Sequence[Mapping[str, Any]], *, readme: Path = README, page: Path = HISTORY) -> None:
    """Writes both tables."""
    page.write_text(history(records), encoding="utf-8")
    readme.write_text(replaced(readme.read_text(encoding="utf-8"), readme_table(records)), encoding="utf-8")


def measure(model: str, out: Path, changes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Runs the benchmark and returns its rows."""
    from preft.bench.rows import read_rows

    command = [sys.executable, "-m", "preft_cli", "bench", "throughput", model, "--out", str(out)]
    command += [part for option in {**CALL, **changes}.items() for part in option]
    done = subprocess.run(command, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.returncode)
    return read_rows(out)


def main() -> None:
    """Measures, records and redraws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="redraw the tables only")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "standing", help="for rows, plots, page and adapters"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--records", type=Path, default=RECORDS, help="another file to append to; the README stays")
    parser.add_argument(
        "--set", action="append", default=[], metavar="--FLAG=VALUE", help="of `preft bench throughput`"
    )
    options = parser.parse_args()
    if not options.tables:
        changes = dict(text.split("=", 1) for text in options.set)
        record = record_of(measure(options.model, options.out, changes))
        with options.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
    if options.records == RECORDS:
        redraw(read_records())
    print(readme_table(read_records(options.records)))


if __name__ == "__main__":
    main()
