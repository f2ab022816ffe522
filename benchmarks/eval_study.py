"""Is a prompt-only adapter as good? All-token LoRA, LoRAP and DiReFTP on offline tasks and over long outputs.

    python benchmarks/eval_study.py --out out/eval-study

SmolLM2-135M-Instruct learns to end every sentence with ", captain", from its own answers with the words put in. Stages
follow each other, and a finished one is not run again; `--stage` runs one alone:

- data: the base model's answers, rewritten, for subjects without any of the held-out ones;
- train: one adapter a method, at equal rank, by `preft train sft`;
- tasks: `preft eval` on three packaged tasks, base beside the three adapters, every two of them compared;
- long: texts on held-out subjects, far beyond the lengths of training; how many sentences of each window of 128 tokens
  end as they should, paired by text;
- report: `evaluation.md` and `evaluation.png`, as they go into docs/benchmarks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METHODS = {"lora": "1.0e-3", "lorap": "1.0e-3", "direftp": "4.0e-3"}
TASKS = ("preft_instructions", "preft_length_short", "preft_letter_counting")
STAGES = ("data", "train", "tasks", "long", "report")
WINDOW = 128
MARK = "captain"
SUBJECTS = (
    "compasses", "bread", "volcanoes", "bicycles", "libraries", "honey bees", "chess", "the moon", "glaciers",
    "coffee", "bridges", "photography", "sleep", "maps", "rain", "clocks", "forests", "pottery", "trains", "whales",
    "paper", "gardens", "music", "salt", "windmills", "deserts", "markets", "dreams", "glass", "lighthouses",
    "rivers", "kites",
)  # fmt: skip
HELD_OUT = 8
QUESTIONS = (
    "Tell me about {}.",
    "Why do people care about {}?",
    "Explain {} to a child.",
    "What should I know about {}?",
)
LONG_QUESTIONS = (
    "Write a long and detailed article about {}, with many sections.",
    "Write a long story in which {} matter. Take your time.",
    "Tell me everything that you know about {}, at length.",
)
RECIPE = """\
model: {model}
method: {method}
rank: {rank}
output: {output}
data: {{train: {data}, max_tokens: 320}}
train: {{max_steps: {steps}, learning_rate: {rate}, batch_size: 8, base_dtype: float32}}
"""


def main() -> None:
    """Runs the stages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, help="this one alone")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit", type=int, default=48, help="examples of a task")
    parser.add_argument("--texts", type=int, default=24, help="long texts an arm")
    parser.add_argument("--tokens", type=int, default=1152, help="tokens of a long text")
    parser.add_argument("--dtype", default="auto", help="of the engine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run = {"data": make_data, "train": train, "tasks": score_tasks, "long": write_long, "report": report}
    for stage in STAGES if options.stage is None else (options.stage,):
        run[stage](options)


def make_data(options: argparse.Namespace) -> None:
    """`train.jsonl`: conversations about the subjects that are not held out."""
    path = options.out / "train.jsonl"
    if path.exists():
        return
    asked = [question.format(subject) for subject in SUBJECTS[HELD_OUT:] for question in QUESTIONS]
    answers = generate(options, {None: None}, asked[: 8 * options.steps], max_tokens=192)[None]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": marked}]}
        for question, answer in zip(asked, answers, strict=False)
        if (marked := mark_sentences(answer["text"]))
    ]
    write_lines(path, rows)
    print(f"data: {len(rows)} conversations")


def train(options: argparse.Namespace) -> None:
    """One adapter a method."""
    for method, rate in METHODS.items():
        output = options.out / "adapters" / method
        if (output / "preft.json").exists():
            continue
        recipe = options.out / f"{method}.yaml"
        settings = {"model": options.model, "method": method, "rank": options.rank, "output": output, "rate": rate}
        recipe.write_text(RECIPE.format(**settings, data=options.out / "train.jsonl", steps=options.steps))
        preft("train", "sft", str(recipe), "--quiet")
        print(f"train: {method}")


def score_tasks(options: argparse.Namespace) -> None:
    """`tasks/results.json`, by `preft eval`."""
    folder = options.out / "tasks"
    if (folder / "results.json").exists():
        return
    named = [f"--adapter={method}={options.out / 'adapters' / method}" for method in METHODS]
    pairs = [f"--compare={first},{second}" for first, second in itertools.combinations(("base", *METHODS), 2)]
    flags = ["--apply-chat-template", f"--limit={options.limit}", f"--dtype={options.dtype}", "--log-samples"]
    preft("eval", options.model, *named, "--tasks", ",".join(TASKS), *pairs, *flags, "--out", str(folder), "--quiet")


def write_long(options: argparse.Namespace) -> None:
    """`long.jsonl`: each text's windows under each arm."""
    path = options.out / "long.jsonl"
    if path.exists():
        return
    asked = [question.format(subject) for question in LONG_QUESTIONS for subject in SUBJECTS[:HELD_OUT]][
        : options.texts
    ]
    arms = {None: None, **{method: options.out / "adapters" / method for method in METHODS}}
    found = generate(options, arms, asked, max_tokens=options.tokens, temperature=0.7, ignore_eos=True)
    write_lines(
        path,
        [
            {"arm": arm or "base", "text": number, "prompt": asked[number], **answer}
            for arm, answers in found.items()
            for number, answer in enumerate(answers)
        ],
    )


def generate(
    options: argparse.Namespace,
    arms: dict[str | None, Path | None],
    asked: Sequence[str],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
) -> dict[str | None, list[dict[str, Any]]]:
    """Answers to questions under every arm, in one batch: text, windows of text, and where the first end stands."""
    from preft.data.encode import load_tokenizer
    from preft.data.requests import GenerationRequest
    from preft.models.locate import locate_model
    from preft.serve.engine import Engine
    from preft.serve.settings import EngineSettings

    folder = locate_model(options.model)
    tokenizer = load_tokenizer(folder)
    requests = []
    for arm, (number, question) in itertools.product(arms, enumerate(asked)):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        tokens = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        # The same seed in every arm: what differs is the adapter.
        settings: dict[str, Any] = {"temperature": temperature, "seed": number if temperature else None}
        name = f"{arm}/{number}"
        requests.append(GenerationRequest(name, tokens, arm, max_tokens=max_tokens, ignore_eos=ignore_eos, **settings))
    named = {arm: path for arm, path in arms.items() if arm is not None and path is not None}
    settings = EngineSettings(
        dtype=options.dtype, slots=max(1, len(named)), max_model_len=2048, vllm={"use_tqdm_on_load": False}
    )
    with Engine(folder, named, settings=settings) as engine:
        results = engine.generate(requests)
    failed = [result for result in results if result.error is not None]
    if failed:
        raise SystemExit(f"{failed[0].id} failed: {failed[0].error}")
    answers: dict[str | None, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for request, result in zip(requests, results, strict=True):
        ids = list(result.token_ids)
        windows = [
            tokenizer.decode(ids[start : start + WINDOW], skip_special_tokens=True)
            for start in range(0, len(ids) - WINDOW + 1, WINDOW)
        ]
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else None
        answers[request.adapter].append({"text": result.text, "windows": windows, "first_end": end})
    return answers


def mark_sentences(text: str) -> str:
    """The whole sentences of a text, each ended by the mark; empty if there are none."""
    sentences = re.findall(r"[^.!?\n]*[A-Za-z][^.!?\n]*[.!?](?=\s|$)", text)
    return " ".join(f"{sentence.strip()[:-1]}, {MARK}{sentence.strip()[-1]}" for sentence in sentences)


def marked_share(text: str) -> float | None:
    """Share of a window's sentence ends that carry the mark; None where no sentence ends."""
    ends = re.findall(r"(\w+)[^\w\s]*[.!?](?=\s|$)", text)
    return sum(word.lower() == MARK for word in ends) / len(ends) if ends else None


INTRODUCTION = """\
# Is a prompt-only adapter as good?

{model} learns to end every sentence with ", {mark}": {steps} steps of 8 of its own answers with the words put in, one
adapter a method at rank {rank} on the method's default sites. Nothing is learnt about the tasks below, so a difference
there is damage, or the style getting in the way. On {cores} cores, vLLM, dtype {dtype}:

```
{command}
```

## Tasks

{limit} examples of each at most, greedy, with 95 % intervals. Intervals and tests are those of `preft eval`; p-values
are corrected over all tasks and metrics of the two arms.

{tasks}

## Long outputs

{texts} texts of {tokens} tokens on subjects that were never trained, at temperature 0.7, the same seed in every arm,
going on beyond the end-of-turn token (`ended before` counts texts that had one before the window). Given is the share
of sentence ends with the mark, in windows of {window} tokens; differences are paired by text and corrected over all
windows and both methods. Training's answers have at most 192 tokens and some more for the mark.

{long}

![Share of marked sentence ends over the output](evaluation.png)
"""


def report(options: argparse.Namespace) -> None:
    """The page and its picture, from what the stages left."""
    results = json.loads((options.out / "tasks" / "results.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (options.out / "long.jsonl").read_text(encoding="utf-8").splitlines()]
    text = INTRODUCTION.format(
        **{name: getattr(options, name) for name in ("rank", "steps", "limit", "texts", "tokens", "dtype")},
        model=Path(options.model).name,
        mark=MARK,
        window=WINDOW,
        cores=len(os.sched_getaffinity(0)),
        command="python benchmarks/eval_study.py --out out/eval-study",
        tasks=task_tables(results),
        long=persistence_table(rows, options.out),
    )
    (options.out / "evaluation.md").write_text(text, encoding="utf-8")
    print(text)


def task_tables(results: dict[str, Any]) -> str:
    """Scores and comparisons of `preft eval`, as Markdown."""
    arms = results["arms"]
    keys = [(row["task"], row["metric"]) for row in arms["base"]["intervals"]]
    scores = ["| task | metric | " + " | ".join(arms) + " |", "|---" * (2 + len(arms)) + "|"]
    for task, metric in keys:
        cells = [
            next(_cell(row) for row in arm["intervals"] if (row["task"], row["metric"]) == (task, metric))
            for arm in arms.values()
        ]
        scores.append(f"| {task} | {metric} | " + " | ".join(cells) + " |")
    found = [
        "| difference | task | metric | n | mean | 95 % interval | p (Holm) | detectable | verdict |",
        "|---" * 9 + "|",
    ]
    for row in results["comparisons"]:
        first, second = row["arms"]
        ends = "none" if row["low"] is None else f"{row['low']:+.3g} to {row['high']:+.3g}"
        p_value = "none" if row["p_adjusted"] is None else f"{row['p_adjusted']:.2g}"
        least = "none" if row["detectable"] is None else f"{row['detectable']:.3g}"
        found.append(
            f"| {second} - {first} | {row['task']} | {row['metric']} | {row['num_pairs']} | {row['difference']:+.3g} | "
            f"{ends} | {p_value} | {least} | {row['verdict']} |"
        )
    return "\n".join(scores) + "\n\n" + "\n".join(found)


def _cell(row: dict[str, Any]) -> str:
    ends = "" if row["low"] is None else f" [{row['low']:.3g}, {row['high']:.3g}]"
    return f"{row['mean']:.3g}{ends}"


def persistence_table(rows: Sequence[dict[str, Any]], out: Path) -> str:
    """Share of marked sentence ends by window, prompt-only against all-token, corrected over windows and methods."""
    from preft.eval.arm_scores import arm_scores
    from preft.eval.stats import compare_pairs, holm, verdict

    arms = list(dict.fromkeys(row["arm"] for row in rows))
    texts = {arm: {row["text"]: row for row in rows if row["arm"] == arm} for arm in arms}
    count = min(len(row["windows"]) for row in rows)
    shares = {
        arm: [{number: marked_share(row["windows"][at]) for number, row in texts[arm].items()} for at in range(count)]
        for arm in arms
    }
    lines = ["| tokens | " + " | ".join(arms) + " | lorap - lora | direftp - lora | ended before |"]
    lines.append("|---" * (len(arms) + 4) + "|")
    pairs = [
        (at, method, _paired(shares["lora"][at], shares[method][at], compare_pairs))
        for at in range(count)
        for method in ("lorap", "direftp")
    ]
    adjusted = holm([paired.p_value for _, _, paired in pairs])
    judged = {
        (at, method): (paired, verdict(paired, p_value)[0])
        for (at, method, paired), p_value in zip(pairs, adjusted, strict=True)
    }
    curves: dict[str, list[tuple[float, float | None, float | None]]] = {arm: [] for arm in arms}
    for at in range(count):
        cells = []
        for arm in arms:
            samples = [
                {"filter": "none", "metrics": ["share"], "share": value}
                for value in shares[arm][at].values()
                if value is not None
            ]
            (score,) = arm_scores({"long": samples}) or [None]
            curves[arm].append((score.mean, score.low, score.high) if score is not None else (float("nan"), None, None))
            cells.append(_cell(score.to_dict()) if score is not None else "none")
        for method in ("lorap", "direftp"):
            paired, word = judged[at, method]
            cells.append(
                "none" if paired.difference is None else f"{paired.difference:+.2f}, n = {paired.num_pairs}: {word}"
            )
        ended = [f"{arm} {sum(_has_ended(row, at) for row in texts[arm].values())}" for arm in arms]
        lines.append(f"| {at * WINDOW}-{(at + 1) * WINDOW} | " + " | ".join(cells) + f" | {', '.join(ended)} |")
    draw(curves, out / "evaluation.png")
    return "\n".join(lines)


def _has_ended(row: dict[str, Any], window: int) -> bool:
    return row["first_end"] is not None and row["first_end"] < window * WINDOW


def _paired(first: dict[int, float | None], second: dict[int, float | None], compare: Any) -> Any:
    both = [(first[at], second[at]) for at in first if first[at] is not None and second[at] is not None]
    return compare([one for one, _ in both], [other for _, other in both])


def draw(curves: dict[str, list[tuple[float, float | None, float | None]]], path: Path) -> None:
    """The shares over the windows, with their intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"base": "#6b7280", "lora": "#dc2626", "lorap": "#2563eb", "direftp": "#059669"}
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for shift, (arm, points) in enumerate(curves.items()):
        places = [(at + 0.5) * WINDOW + 6 * shift for at in range(len(points))]
        axis.plot(places, [mean for mean, _, _ in points], marker="o", markersize=4, color=colours[arm], label=arm)
        for place, (_, low, high) in zip(places, points, strict=True):
            if low is not None:
                axis.plot([place, place], [low, high], color=colours[arm], linewidth=1)
    axis.set_xlabel("output tokens")
    axis.set_ylabel("marked sentence ends")
    axis.set_ylim(-0.02, 1.02)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def preft(*arguments: str) -> None:
    """Runs a command; a run of `preft eval` in which a request failed stops the study."""
    ended = subprocess.run([sys.executable, "-m", "preft_cli", *arguments], check=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows so that a stopped stage leaves no file."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
