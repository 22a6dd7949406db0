"""Answers read off completions, and votes over them."""

import pytest

from rlinf.data.estimates import majority
from rlinf.data.text_evaluation import read_answers
from rlinf.rewards.math_answer import MathConfig


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("so \\boxed{B}", "B"),
        ("first \\boxed{A}, no: \\boxed{C}.", "C"),
        ("\\boxed{\\text{D}}", "D"),
        ("\\boxed{\\textbf{(a)}}", "A"),
        ("\\boxed{(B) two}", "B"),
        ("\\boxed{ C) three }", "C"),
        ("\\boxed{2}", None),
        ("\\boxed{two}", None),
        ("\\boxed{}", None),
        ("the answer is B", None),
        ("\\boxed{B", None),
    ],
)
def test_letters(text: str, letter: str | None) -> None:
    assert read_answers([text], "letter") == (letter,)


def test_equal_formulas_are_written_as_the_first_of_them() -> None:
    pytest.importorskip("math_verify")
    texts = [
        "\\boxed{\\frac{1}{2}}",
        "no box: 0.5",
        "\\boxed{0.5}",
        "\\boxed{3}",
        "\\boxed{ 1/2 }",
        "\\boxed{3.0}",
        "\\boxed{}",
        "\\boxed{x+1}",
        "\\boxed{1+x}",
    ]
    half, three, sum_ = "\\frac{1}{2}", "3", "x+1"
    expected = (half, half, half, three, half, three, None, sum_, sum_)
    assert read_answers(texts, "math") == expected


def test_what_cannot_be_read_equals_itself_alone() -> None:
    pytest.importorskip("math_verify")
    texts = ["\\boxed{\\frac{}", "\\boxed{???}", "\\boxed{???}", "\\boxed{7}"]
    assert read_answers(texts, "math") == (None, "???", "???", "7")


def test_formulas_in_thoughts_do_not_vote() -> None:
    pytest.importorskip("math_verify")
    texts = [
        "<think>\\boxed{7}</think> \\boxed{8}",
        "<think>\\boxed{7}</think> and so I gave it up",
        "\\boxed{7}",
    ]
    assert read_answers(texts, "math") == ("8", None, "7")


def test_formulas_are_looked_for_where_the_reward_looks() -> None:
    pytest.importorskip("math_verify")
    texts = [
        "<answer>1/2</answer>",
        "first 7, then <answer>3</answer>",
        "It is 3.0.",
        "so $\\frac{1}{2}$",
        "I do not know what to do.",
        "<answer></answer> 3",
        "The answer is **Yes**",
        "\\boxed{yes}",
    ]
    assert read_answers(texts, "math") == ("1/2", "3", "3", "1/2", None, None, "Yes", "Yes")
    boxes = MathConfig(require_boxed=True)
    assert read_answers(texts, "math", boxes) == (None,) * 7 + ("yes",)


def test_the_vote_counts_equal_formulas_together() -> None:
    pytest.importorskip("math_verify")
    texts = ["\\boxed{2}", "\\boxed{\\frac{1}{2}}", "\\boxed{2}", "\\boxed{0.5}", "\\boxed{1/2}"]
    right = [False, True, False, True, True]
    assert majority(right, read_answers(texts, "math")) == 1.0


def test_of_equally_many_votes_the_first_answer_counts() -> None:
    assert majority([False, True, True, False], ["a", "b", "b", "a"]) == 0.0
    assert majority([True, False, False, True], ["b", "a", "a", "b"]) == 1.0
