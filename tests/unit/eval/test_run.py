"""A whole evaluation on local tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from preft import load_adapter
from preft.errors import FileError, UnsupportedError, UsageError
from preft.eval import suites
from preft.eval.files import RESULTS, dump, require_free, save_evaluation
from preft.eval.run import EvalSpec, Evaluation, evaluate
from preft.eval.tasks import find_tasks, load_tasks
from preft.eval.vllm_model import PreftVLLM
from tests.unit.eval.conftest import ARMS

TASKS = ("tiny_choice", "tiny_write", "tiny_roll")


@pytest.fixture(scope="module")
def evaluation(tiny_llama: Path, adapters: dict[str, Path], tasks: Path) -> Evaluation:
    spec = EvalSpec(
        str(tiny_llama),
        adapters,
        TASKS,
        engine="hf",
        include_path=tasks,
        dtype="float32",
        compare=(("base", "lorap"), ("lora", "lorap")),
    )
    return evaluate(spec)


def test_base_stands_beside_the_adapters(evaluation: Evaluation, adapters: dict[str, Path]) -> None:
    document = evaluation.document
    assert list(document["arms"]) == ["base", *ARMS]
    for arm, path in adapters.items():
        assert document["arms"][arm]["digest"] == load_adapter(path).digest
    assert [document["arms"][arm]["positions"] for arm in ARMS] == ["all", "prompt", "prompt"]
    assert document["arms"]["base"]["digest"] is None
    assert {"preft", "lm_eval", "torch", "transformers"} <= set(document["versions"])
    for arm in document["arms"].values():
        assert {"acc,none", "acc_stderr,none"} <= set(arm["results"]["tiny_choice"])


def test_base_is_the_harness_exactly(evaluation: Evaluation, tiny_llama: Path, tasks: Path) -> None:
    stock = lm_eval.simple_evaluate(
        model=HFLM(str(tiny_llama), dtype="float32", device="cpu"),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    results = evaluation.document["arms"]["base"]["results"]
    assert results["tiny_choice"]["acc,none"] == stock["results"]["tiny_choice"]["acc,none"]
    for task in TASKS:
        ours, theirs = evaluation.samples["base"][task], stock["samples"][task]
        assert [sample["resps"] for sample in ours] == [sample["resps"] for sample in theirs]
        assert [sample["doc_hash"] for sample in ours] == [sample["doc_hash"] for sample in theirs]


def test_the_arms_are_compared_by_example(evaluation: Evaluation) -> None:
    rows = {(row.task, row.first, row.second): row for row in evaluation.comparisons}
    assert set(rows) == {(task, first, "lorap") for task in ("tiny_choice", "tiny_write") for first in ("base", "lora")}
    row = rows["tiny_choice", "base", "lorap"]
    assert row.paired.num_pairs == 12
    assert row.paired.test == "mcnemar-exact"
    assert row.verdict in ("better", "worse", "cannot tell")
    assert any("word_perplexity" in text for text in evaluation.warnings)


def test_prompt_only_adapters_score_whole_texts_as_base(evaluation: Evaluation) -> None:
    scores = {
        arm: [sample["resps"] for sample in evaluation.samples[arm]["tiny_roll"]] for arm in ("base", "lorap", "lora")
    }
    flat = {arm: [value[0][0] for value in values] for arm, values in scores.items()}
    assert flat["lorap"] == pytest.approx(flat["base"], abs=1e-4)
    assert flat["lora"] != pytest.approx(flat["base"], abs=1e-2)


def test_the_files_are_the_harness_s(evaluation: Evaluation, tmp_path: Path) -> None:
    files = save_evaluation(evaluation, tmp_path, log_samples=True)
    assert {path.name for path in files} == {
        RESULTS,
        *(f"samples_{arm}_{task}.jsonl" for arm in ("base", *ARMS) for task in TASKS),
    }
    assert json.loads((tmp_path / RESULTS).read_text())["arms"]["lorap"]["kind"] == "LoRAP"
    rows = [json.loads(line) for line in (tmp_path / "samples_lorap_tiny_choice.jsonl").read_text().splitlines()]
    assert [row["doc_id"] for row in rows] == list(range(12))
    assert rows[0]["arguments"]["gen_args_0"]["arg_0"].startswith("The apple near")
    assert {"doc", "target", "resps", "filtered_resps", "acc", "doc_hash", "prompt_hash", "target_hash"} <= set(rows[0])
    with pytest.raises(FileError, match="earlier evaluation"):
        require_free(tmp_path)
    require_free(tmp_path, force=True)


def test_an_interruption_leaves_no_results_that_look_whole(
    evaluation: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_evaluation(evaluation, tmp_path, log_samples=True)
    plain = Path.write_text
    written: list[str] = []

    def interrupted(path: Path, text: str, **settings: str) -> int:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        return plain(path, text, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_evaluation(evaluation, tmp_path, log_samples=True)
    assert len(written) == 2
    assert not (tmp_path / RESULTS).exists()
    require_free(tmp_path)


def test_numbers_that_json_does_not_have_become_null() -> None:
    assert dump({"a": float("inf"), "b": [float("nan"), 1.5], "c": len}).startswith(
        '{"a": null, "b": [null, 1.5], "c": '
    )


def test_the_models_serve_the_harness_s_own_entry(
    evaluation: Evaluation, tiny_llama: Path, adapters: dict[str, Path], tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, from `simple_evaluate`, as the guide shows."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    found = lm_eval.simple_evaluate(
        model="preft-hf",
        model_args={"pretrained": str(tiny_llama), "adapter": str(adapters["lorap"]), "dtype": "float32"},
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    ours = [sample["resps"] for sample in evaluation.samples["lorap"]["tiny_choice"]]
    assert [sample["resps"] for sample in found["samples"]["tiny_choice"]] == ours
    assert found["config"]["arm"] == "lorap"


def test_a_conversation_with_examples(tiny_llama: Path, adapters: dict[str, Path], tasks: Path) -> None:
    spec = EvalSpec(
        str(tiny_llama),
        {"lorap": adapters["lorap"]},
        ("tiny_choice", "tiny_write"),
        engine="hf",
        include_path=tasks,
        dtype="float32",
        num_fewshot=2,
        limit=3,
        apply_chat_template=True,
    )
    found = evaluate(spec)
    for task in spec.tasks:
        prompts = [[sample["prompt_hash"] for sample in arm[task]] for arm in found.samples.values()]
        assert prompts[0] == prompts[1]
    assert found.document["chat_template_sha256"]
    prompt = found.samples["lorap"]["tiny_write"][0]["arguments"][0][0]
    assert prompt.count("<|im_start|>user") == 3
    assert prompt.endswith("<|im_start|>assistant\n")
    assert found.document["arms"]["base"]["n-samples"]["tiny_write"]["effective"] == 3
    assert {row.verdict for row in found.comparisons} == {"cannot tell"}


def test_several_answers_to_each_example(tiny_llama: Path, adapters: dict[str, Path], sampled_task: Path) -> None:
    spec = EvalSpec(
        str(tiny_llama),
        {"lorap": adapters["lorap"]},
        ("short_counting",),
        engine="hf",
        include_path=sampled_task,
        dtype="float32",
        batch_size=8,
        limit=4,
        samples=3,
    )
    found = evaluate(spec)
    for arm in ("base", "lorap"):
        answers = [sample["resps"][0] for sample in found.samples[arm]["short_counting"]]
        assert [len(each) for each in answers] == [3] * 4
        assert all(len(set(each)) > 1 for each in answers)
        assert {row["metric"] for row in found.document["arms"][arm]["intervals"]} == {
            "exact", "flexible", "pass@1", "pass@2", "pass@3",
        }  # fmt: skip
    assert found.document["settings"]["temperature"] == 0.8
    again = evaluate(spec)
    resps = [
        [sample["resps"] for arm in ("base", "lorap") for sample in each.samples[arm]["short_counting"]]
        for each in (found, again)
    ]
    assert resps[0] == resps[1]


def test_written_code_runs_only_where_it_is_allowed(
    tiny_llama: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The harness asks once more by itself; the command's flag answers both."""
    folder = suites.suites_folder()
    text = f"include: {folder / 'humaneval.yaml'}\ntask: preft_short_code\n"
    (tmp_path / "t.yaml").write_text(text + "generation_kwargs: {until: [], do_sample: false, max_gen_toks: 4}\n")
    spec = EvalSpec(
        str(tiny_llama),
        {"lorap": adapters["lorap"]},
        ("preft_short_code",),
        engine="hf",
        include_path=tmp_path,
        dtype="float32",
        limit=2,
    )
    with pytest.raises(UnsupportedError, match="runs code"):
        evaluate(spec)
    found = evaluate(replace(spec, allow_code_execution=True))
    assert found.document["arms"]["lorap"]["results"]["preft_short_code"]["pass@1,none"] == 0.0
    assert found.document["settings"]["allow_code_execution"] is True


def test_what_is_asked_about_several_answers_must_have_a_meaning(
    tiny_llama: Path, adapters: dict[str, Path], tasks: Path
) -> None:
    for wrong, message in (
        ({"samples": 0}, "`--samples`"),
        ({"temperature": 0.5}, "no meaning"),
        ({"samples": 2, "temperature": 0.0}, "`--temperature`"),
        ({"samples": 2}, "one answer an example"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate(EvalSpec(str(tiny_llama), adapters, ("tiny_write",), include_path=tasks, **wrong))  # type: ignore[arg-type]


@pytest.mark.engine
def test_the_engines_agree_on_a_whole_evaluation(
    evaluation: Evaluation, tiny_llama: Path, adapters: dict[str, Path], tasks: Path
) -> None:
    pytest.importorskip("vllm")
    spec = EvalSpec(
        str(tiny_llama),
        adapters,
        TASKS,
        include_path=tasks,
        dtype="float32",
        slots=2,
        engine_options={
            "max_rank": 64,
            "max_model_len": 400,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "kv_cache_gib": 0.25,
        },
    )
    found = evaluate(spec)
    assert found.failures == ()
    for arm in ("base", *ARMS):
        for task in TASKS:
            pairs = zip(found.samples[arm][task], evaluation.samples[arm][task], strict=True)
            for ours, theirs in pairs:
                assert ours["prompt_hash"] == theirs["prompt_hash"]
                one, other = ours["resps"], theirs["resps"]
                if task == "tiny_write":
                    assert one == other
                else:
                    assert [_number(value[0]) for value in one] == pytest.approx(
                        [_number(value[0]) for value in other], abs=1e-3
                    )


def _number(value: object) -> float:
    return float(value[0] if isinstance(value, tuple | list) else value)  # type: ignore[arg-type]


def test_wrong_names_are_refused_before_anything_is_loaded(
    tiny_llama: Path, adapters: dict[str, Path], tasks: Path
) -> None:
    for pair in (("base", "absent"), ("lora", "lora")):
        with pytest.raises(UsageError, match="arms to compare"):
            evaluate(EvalSpec(str(tiny_llama), adapters, TASKS, compare=(pair,), include_path=tasks))
    with pytest.raises(UsageError, match="`--limit`"):
        evaluate(EvalSpec(str(tiny_llama), adapters, TASKS, limit=0, include_path=tasks))
    options = {"gpu_memory_utilization": 0.5}
    with pytest.raises(UsageError, match="say nothing to Transformers"):
        evaluate(EvalSpec("none", adapters, TASKS, engine="hf", engine_options=options, include_path=tasks))
    with pytest.raises(UsageError, match="`--engine`"):
        evaluate(EvalSpec(str(tiny_llama), adapters, TASKS, engine="other", include_path=tasks))


def test_an_arm_that_is_not_there_starts_no_engine(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("preft.eval.vllm_model.RankedEngine", start)
    with pytest.raises(UsageError, match="no such arm"):
        PreftVLLM(tiny_llama, arm="absent")
    with pytest.raises(AssertionError, match="was started"):
        PreftVLLM(tiny_llama)


def test_an_unknown_task_names_near_ones(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import preft.eval.tasks as module

    # The harness's own definitions take seconds to read; the folder's do here.
    make = suites.task_manager
    monkeypatch.setattr(module, "task_manager", lambda include_path, include_defaults=False: make(include_path))
    with pytest.raises(UsageError) as caught:
        find_tasks(["tiny_choise"], tasks)
    assert "tiny_choice" in str(caught.value)
    with pytest.raises(UsageError, match="No task"):
        find_tasks([])
    with pytest.raises(FileError, match="folder of tasks"):
        find_tasks(["x"], tasks / "absent")
    _, names = find_tasks(["tiny_*"], tasks)
    assert names == ["tiny_choice", "tiny_roll", "tiny_write"]


def test_data_that_cannot_be_reached_is_an_error_of_its_own(tasks: Path, tmp_path: Path) -> None:
    text = (tasks / "choice.yaml").read_text().replace("rows.jsonl", "absent.jsonl")
    (tmp_path / "choice.yaml").write_text(text)
    manager, names = find_tasks(["tiny_choice"], tmp_path)
    with pytest.raises(FileError, match="cannot be reached"):
        load_tasks(manager, names)


@pytest.mark.full
def test_the_harness_s_names_work_where_their_data_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows in memory in place of the hub, then without a network; its definitions take seconds to read."""
    import datasets

    question = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
    split = datasets.Dataset.from_list([question] * 6)
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: {"train": split, "test": split})
    far = ("gsm8k", "ifeval", "mmlu_anatomy", "hendrycks_math_algebra")
    manager, names = find_tasks([*far, "humaneval", "preft_chain_sum"])
    assert names == [*far, "humaneval", "preft_chain_sum"]
    loaded = load_tasks(manager, ["gsm8k", "preft_chain_sum"])["tasks"]
    assert len(loaded["gsm8k"].eval_docs) == 6
    assert loaded["preft_chain_sum"].config.metadata["version"] == 1.0

    def unreachable(**_: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name in far:
        with pytest.raises(FileError) as caught:
            load_tasks(manager, [name])
        assert "`preft_...`" in str(caught.value)
    with pytest.raises(UnsupportedError, match="outside the sandbox"):
        load_tasks(manager, ["humaneval"])


def test_a_task_that_runs_written_code_is_refused_before_it_is_loaded(tasks: Path, tmp_path: Path) -> None:
    text = (tasks / "write.yaml").read_text().replace("rows.jsonl", "absent.jsonl") + "unsafe_code: true\n"
    (tmp_path / "write.yaml").write_text(text)
    manager, names = find_tasks(["tiny_write"], tmp_path)
    with pytest.raises(UnsupportedError, match="runs code"):
        load_tasks(manager, names)
