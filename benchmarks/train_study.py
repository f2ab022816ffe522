"""Does rank close the gap? All-token LoRA, LoRAP and DiReFTP over ranks and seeds on one generated task.

    python benchmarks/train_study.py --out out/train-study

SmolLM2-135M-Instruct learns to reverse lists of words (reasoning-gym's `word_sequence_reversal`; every list is drawn
anew, and no held-out list is learnt). `preft train sweep` does the work: equal ranks and equal numbers of parameters,
evaluation loss and exact completions on the held-out lists, intervals over examples and seeds. Rank 18 is the one at
which DiReFTP has as many parameters as LoRA at rank 2, so three arms of it serve both comparisons. A run that is
stopped goes on where it was. 21 runs of about a minute on two cores; writes `tables.md` beside the sweep's own files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

TASK = "word_sequence_reversal"
RECIPE = """\
model: {model}
method: lora
rank: 8
output: {out}/sweep
data: {{train: {out}/train.jsonl, eval: {out}/eval.jsonl, max_tokens: 256}}
train: {{max_steps: {steps}, learning_rate: 1.0e-3, batch_size: 8, base_dtype: {dtype}}}
"""


def main() -> None:
    """Writes the data and the recipe, and runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder, embedded name or hub id")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--ranks", default="2,18")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default="lora,lorap,direftp")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out, 8 * options.steps, options.held_out)
    recipe = options.out / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(model=options.model, out=options.out, steps=options.steps, dtype=options.dtype), encoding="utf-8"
    )
    command = [sys.executable, "-m", "preft_cli", "train", "sweep", f"{recipe}", "--rate", "direftp=4e-3"]
    command += ["--ranks", options.ranks, "--seeds", options.seeds, "--methods", options.methods]
    if (options.out / "sweep").is_dir():
        command.append("--resume")
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    write_tables(options.out)


def write_data(folder: Path, num_train: int, num_eval: int) -> None:
    """Two files of conversations without a question in common; the same ones for the same numbers."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(TASK, size=num_train + 2 * num_eval, seed=0, min_words=3, max_words=5)
    rows = {entry["question"]: entry["answer"] for entry in drawn}
    talks = [_row(question, answer) for question, answer in rows.items()]
    for name, part in (("eval", talks[:num_eval]), ("train", talks[num_eval : num_eval + num_train])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_tables(folder: Path) -> None:
    """The sweep's tables as Markdown."""
    from preft.train.sweep_report import arm_cells, difference_cells

    summary = json.loads((folder / "sweep" / "summary.json").read_text(encoding="utf-8"))
    parts = []
    for cells, found in ((arm_cells, summary["arms"]), (difference_cells, summary["differences"])):
        rows = [cells(entry) for entry in found]
        if rows:
            lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
            parts.append("\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines))
    (folder / "tables.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _row(question: str, answer: str) -> dict[str, object]:
    words = question.rpartition(":")[2].strip()
    asked = f"Reverse this list of words: {words}"
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    main()
