"""The reward functions on tables of completions."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.rewards.math_answer import MathConfig, MathReward
from rlinf.rewards.protocol import RewardInput
from rlinf.rewards.text import (
    ExactMatchConfig,
    FormatConfig,
    LengthConfig,
    code_block,
    last_answer,
    last_boxed,
    last_line,
    normalize,
    references,
)


def sample(completion: str, answer=None, num_tokens: int = 1) -> RewardInput:
    return RewardInput(prompt="", completion=completion, num_tokens=num_tokens, answer=answer)


@pytest.fixture(scope="module")
def math_reward():
    return MathReward(MathConfig())


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"so \boxed{42}", "42", True),
        (r"so \boxed{42}", 42, True),
        (r"so \boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{\frac12}", "1/2", True),
        (r"\boxed{41}", "42", False),
        (r"\boxed{41} no, \boxed{42}", ["42"], True),
        (r"\boxed{42} no, \boxed{41}", ["42"], False),
        (r"\boxed{7}", ["42", "7"], True),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", True),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
        (r"\boxed{1,000}", "1000", True),
        (r"\boxed{x=3}", "3", True),
        ("I think the answer is 42.", "42", True),
        ("first 42, then 41", "42", False),
        ("The answer is $\\frac{3}{4}$.", "0.75", True),
        (r"cut off \boxed{4", "41", False),
        ("nothing", "42", False),
        ("", "42", False),
        (r"\boxed{}", "42", False),
        (r"\boxed{42}", r"The answer is \boxed{42}", True),
        (r"\boxed{42}", "$42$", True),
        (r"\boxed{\$18.90}", r"\$18.90", True),
        (r"\boxed{32348}", r"\$32,\!348", True),
        (r"\boxed{\$35}", r"\$36", False),
        ("<think>no idea how many</think><answer>5</answer>", "5", True),
        ("<think>20 + 22 = 42</think>\n<answer>41</answer>", "42", False),
        ("<think>20 + 22 = 42</think>\n<answer>-42</answer>", "42", False),
        ("<think>so</think><answer>x^2</answer>", "x^2", True),
        ("<think>7 is tempting</think> I do not know.", "7", False),
        (r"<think>maybe \boxed{7}? no</think> It is 8", "8", True),
        (r"<think>maybe \boxed{7}? no</think> It is 8", "7", False),
        ("<think>so <answer>7</answer>?</think> It is 8", "8", True),
        ("<think>so <answer>7</answer>?</think> It is 8", "7", False),
        (r"<think>a</think> \boxed{7} <think>no</think> \boxed{8}", "8", True),
        (r"<think>\boxed{7}</think>", "7", False),
        (r"<think>\boxed{7}", "7", True),
        (r"\boxed{6.02\times 10^{-23}}", r"1.6\times 10^{-19}", False),
        (r"\boxed{0.00000012}", "0.00000049", False),
        (r"\boxed{1.6\times 10^{-19}}", "0.00000000000000000016", True),
        (r"\boxed{0.333333}", "1/3", True),
        (r"\boxed{10\,000}", "10000", True),
        (r"\boxed{10 000}", "10000", True),
        (r"\boxed{12.5\%}", "12.5", True),
        (r"\boxed{12.5}", r"12.5\%", True),
        (r"\boxed{0.125}", r"12.5\%", True),
        (r"\boxed{0.5\%}", r"50\%", False),
        (r"\boxed{50\%}", r"0.5\%", False),
        (r"\boxed{12.50\%}", r"12.5\%", True),
        ("The answer is −5.", "-5", True),
        ("The answer is −5.", "5", False),
        (r"\boxed{√2}", r"\sqrt{2}", True),
        (r"\boxed{x²}", "x^2", True),
        (r"\boxed{½}", "0.5", True),
        (r"\boxed{1.5}", "1 1/2", True),
        (r"\boxed{1\frac12}", "1 1/2", True),
        (r"\boxed{1}", "1 1/2", False),
        (r"\boxed{2 3/4}", "2.75", True),
        (r"\boxed{2 3/4}", "1.25", False),
        ("<answer>-2 3/4</answer>", "-11/4", True),
        ("The answer is 2 3/4.", "2.75", True),
        ("The answer is 2 3/4.", "0.75", False),
        (r"\boxed{3, 2 3/4}", "2.75, 3", True),
        (r"\boxed{1,001.5}", "1,001 1/2", True),
        (r"\boxed{1000}", "1e3", True),
        ("<answer>1e3</answer>", "1000", True),
        ("The answer is 1e3.", "1000", True),
        (r"\boxed{1}", "1e3", False),
        (r"\boxed{0.0025}", "2.5e-3", True),
        (r"\boxed{6.02\times 10^{23}}", "6.02e23", True),
        ("so 6.02e23 it is", "602000000000000000000000", True),
        (r"\boxed{1e+3}", "1000", True),
        (r"\boxed{1.6e-19}", r"1.6\times 10^{-19}", True),
        (r"\boxed{6.02e22}", "6.02e23", False),
        (r"\boxed{2e^{3}}", "2e^3", True),
        (r"\boxed{\sqrt{3x+1}}", "√(3x+1)", True),
        (r"\boxed{√(2+√(x+1))+1}", r"1+\sqrt{2+\sqrt{x+1}}", True),
        (r"\boxed{\sqrt{a}+b}", "√(a+b)", False),
        (r"\boxed{\sqrt{2.5}}", "√2.5", True),
        (r"\boxed{0.5\sqrt{2}}", "√2.5", False),
        ("The answer is $√2$.", r"\sqrt{2}", True),
        (r"\boxed{5}", "5 dollars", True),
        ("<answer>5 dollars.</answer>", "5", True),
        (r"\boxed{5}", "€5", True),
        (r"\boxed{6}", "5 dollars", False),
        (r"It costs \$6.", "6", True),
        (r"It costs \$5 and \$6.", "5", False),
        ("<answer>**6**</answer>", "6", True),
        (rf"\boxed{{{'9' * 5000} 1/2}}", "6", False),
        (r"\boxed{9e999}", "6", False),
        ("B", "B", True),
        ("**B**", "B", True),
        ("It is easy.\n\n**The answer is (B).**", "B", True),
        ("The answer is B.", "C", False),
        ("The answer is not B.", "B", False),
        ("B or C", "B", False),
        ("The answer is **Yes**", "Yes", True),
        ("Final answer: no", "Yes", False),
        ("I do not know", "No", False),
        ("Yes\nor no", "Yes", False),
        (r"\boxed{sin x}", r"\sin x", True),
        (r"\boxed{\sin x}", "sin(x)", True),
        (r"\boxed{cos x}", r"\sin x", False),
        (r"\boxed{2pi}", r"2\pi", True),
        (r"\boxed{log_2 8 + log 2}", r"3 + \log 2", True),
        (r"\boxed{\text{log in}}", "log in", True),
        (r"\boxed{\text{tan}}", "tan", True),
        (r"\boxed{CAB}", "ABC", False),
        (r"\boxed{\text{ABC}}", "ABC", True),
        (r"\boxed{\text{silent}}", "silent", True),
        ("<answer>silent</answer>", "listen", False),
        ("The answer is $on$.", "no", False),
        (r"\boxed{yes}", "Yes", True),
        (r"\boxed{ba+c}", "c+ab", True),
        (r"\boxed{5}", "x=5", True),
        (r"\boxed{x^2}", "f(x)=x^2", True),
        (r"\boxed{5}", "AB=5", True),
        (r"\boxed{30}", r"m\angle A=30", True),
        (r"\boxed{5}", "a+b=5", False),
        (r"\boxed{5}", "xy=5", False),
        (r"\boxed{5}", "a+b=c=5", False),
        (r"\boxed{b+a=5}", "a+b=5", True),
        (r"\boxed{a+b=5}", "5", True),
    ],
)
def test_math(math_reward, completion, answer, right):
    assert math_reward(sample(completion, answer)) == (1.0 if right else -1.0)


@pytest.mark.parametrize(("right", "value"), [(True, 5.0), (False, -5.0)])
def test_math_scale_of_the_published_recipes(right, value):
    reward = MathReward(MathConfig(scale=5.0))
    assert reward(sample(rf"\boxed{{{1 if right else 2}}}", "1")) == value


def test_math_may_ask_for_a_box():
    reward = MathReward(MathConfig(require_boxed=True, max_value=1.0, min_value=0.0))
    assert reward(sample("the answer is 42", "42")) == 0.0
    assert reward(sample(r"\boxed{42}", "42")) == 1.0


def test_math_answer_that_takes_forever_is_wrong():
    reward = MathReward(MathConfig(seconds=0.5))
    started = time.monotonic()
    assert reward(sample(r"\boxed{10^{10^{10}}}", "3")) == -1.0
    assert time.monotonic() - started < 20
    assert reward(sample(r"\boxed{3}", "3")) == 1.0


@pytest.mark.parametrize("answer", [None, [], "", " \n", ["1", " "], {"a": 1}, ["1", None], "$$"])
def test_math_refuses_a_reference_that_is_none(math_reward, answer):
    with pytest.raises(ValueError, match=r"answer|reference"):
        math_reward(sample(r"\boxed{1}", answer))


def test_math_outside_the_main_thread_says_why(math_reward):
    """It is why scoring has processes of its own."""
    errors = []

    def run() -> None:
        try:
            math_reward(sample(r"\boxed{1}", "1"))
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


@pytest.mark.parametrize(
    ("length", "value"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_over_long_penalty_of_the_paper(length, value):
    """The setting of DAPO: L_max 20480, L_cache 4096."""
    config = LengthConfig(max_length=20480, cache_length=4096)
    assert config.build()(sample("", num_tokens=length)) == pytest.approx(value)


@given(st.integers(0, 500), st.integers(1, 200), st.integers(1, 200))
def test_over_long_penalty_falls_from_nothing_to_minus_one(length, maximum, cache):
    cache = min(cache, maximum)

    def penalty(tokens: int) -> float:
        config = LengthConfig(max_length=maximum, cache_length=cache)
        return config.score(sample("", num_tokens=tokens))

    assert -1 <= penalty(length + 1) <= penalty(length) <= 0
    if length <= maximum - cache:
        assert penalty(length) == 0
    elif length <= maximum:
        assert penalty(length) == pytest.approx(((maximum - cache) - length) / cache)
    else:
        assert penalty(length) == -1


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<answer>Paris</answer>", 1.0),
        ("<answer> the  PARIS! </answer>", 1.0),
        ("<answer>Rome</answer> or <answer>Paris</answer>", 1.0),
        ("<answer>Paris</answer> or <answer>Rome</answer>", 0.1),
        ("<answer>Lutetia</answer>", 1.0),
        ("<answer>Rome</answer>", 0.1),
        ("Paris", 0.0),
        ("<answer>Paris", 0.0),
        ("<answer><answer>Paris</answer>", 1.0),
        ("<answer>Paris</answer>" * 10, 1.0),
        ("<answer>Paris</answer>" * 11, 0.25),
        ("<think><answer>Rome</answer>?</think><answer>Paris</answer>", 1.0),
        ("<think>maybe <answer>Paris</answer></think> It is Rome", 0.0),
        ("<answer>Paris</answer></think>", 0.0),
        ("<think><answer>Paris</answer>", 1.0),
    ],
)
def test_exact_match_in_tags(completion, value):
    reward = ExactMatchConfig(found_value=0.1).build()
    assert reward(sample(completion, ["Paris", "Lutetia"])) == value


@pytest.mark.parametrize(
    ("settings", "completion", "right"),
    [
        ({"extract": "last_line"}, "so\n\n42\n\n", True),
        ({"extract": "last_line"}, "42\nno", False),
        ({"extract": "last_line"}, "", False),
        ({"extract": "everything"}, " 42 ", True),
        ({"extract": "everything", "strip_whitespace": False}, " 42 ", False),
        ({"extract": "pattern", "pattern": r"is (\d+)"}, "it is 7, no, it is 42 now", True),
        ({"extract": "pattern", "pattern": r"\d+"}, "7 and 42", True),
        ({"extract": "pattern", "pattern": r"\d+"}, "none", False),
    ],
)
def test_exact_match_elsewhere(settings, completion, right):
    reward = ExactMatchConfig(**settings).build()
    assert reward(sample(completion, "42")) == float(right)


@pytest.mark.parametrize(
    ("off", "text", "reference"),
    [
        ("lower", "Rome", "rome"),
        ("strip_punctuation", "rome.", "rome"),
        ("strip_articles", "the rome", "rome"),
        ("strip_whitespace", "rome  city", "rome city"),
    ],
)
def test_each_normalisation_can_be_switched_off(off, text, reference):
    assert normalize(text) == normalize(reference)
    assert normalize(text, **{off: False}) != normalize(reference, **{off: False})


@pytest.mark.parametrize(
    ("reference", "completion", "right"),
    [
        ("-5", "5", False), ("1.5", "15", False), ("1/2", "12", False), ("+", "-", False),
        ("[1,2]", "12", False), ("-.5", ".5", False), ("x = -5", "x = 5", False),
        ("A", "", False), ("A", "the", False), ("A", "a.", True), ("1,000", "1000", True),
        ("42", "42.", True), ("5", "$5", True), ("covid-19", "COVID19", True), ("-3", "(-3)", True),
        ("5", "-$5", False), ("-5", "-$5", True), ("-5", "- 5", True), ("-5", "−5", True),
        ("C", "A, C", False), ("A", "A, B", False), ("x > 5", "x < 5", False), ("x", "-x", False),
        ("x<5", "x < 5", True), ("C", "C++", False), ("1,2,3", "1, 2, 3", True),
        ("[1,2]", "[1, 2]", True), ("(3,4)", "(3, 4)", True), ("Paris", "“Paris”", True),
        ("x>=5", "x<=5", False), ("x!=5", "x=5", False), ("x<=5", "x<5", False),
        ("x>=5", "x >= 5", True), ("x>=5", "x ≥ 5", True), ("x==5", "x == 5", True),
        ("x", "== x ==", True),
        ("≠ 5", "5", False), ("5 ≠ 6", "5!=6", True), ("5! = 120", "5!=120", True),
        ("1e-5", "1e5", False), ("1E-5", "1e-5", True), ("5!", "5", False),
        ("Paris", "Paris!", True), ("A,B", "A, B", True), ("A,B", "AB", False),
        ("1/2", "1 / 2", True), ("A,-3", "A, -3", True),
        ("July 4, 1776", "July 4 1776", True), ("July 4 1776", "july 4,1776.", True),
        ("Jan. 5, 2020", "Jan 5 2020", True), ("July 4, 1776", "July 4, 1777", False),
        ("12, 13", "12 13", False), ("May 4, 5", "May 4 5", False),
        ("hello, world", "hello world", True), ("1,000,5", "1000, 5", True),
        ("don't", "don’t", True), ("a cat", "cat", True), (r"\frac{1}{2}", r"-\frac{1}{2}", False),
    ],
)  # fmt: skip
def test_marks_of_a_number_and_an_answer_of_one_letter_count(reference, completion, right):
    reward = ExactMatchConfig(extract="everything").build()
    assert reward(sample(completion, reference)) == float(right)


@given(st.text())
def test_normalising_twice_changes_nothing_more(text):
    """The order of the steps is that of SQuAD, where it holds but for case and marks."""
    once = normalize(text, lower=False, strip_articles=False)
    assert normalize(once, lower=False, strip_articles=False) == once


@pytest.mark.parametrize(
    "text",
    [" + " + "+" * 90_000, "-" + " " * 300_000, "5" + "!" * 90_000, "- " * 90_000, "_+" * 90_000],
)
@pytest.mark.timeout(60)  # which quadratic work exceeds many times
def test_an_answer_of_marks_is_wrong_and_not_invalid(text):
    assert ExactMatchConfig().build()(sample(f"<answer>{text}</answer>", "Paris")) == 0.0


def test_an_empty_answer_equals_no_reference():
    with pytest.raises(ValueError, match="no text, number or list"):
        ExactMatchConfig().build()(sample("<answer></answer>", ["  "]))


GOOD = "<think>one and one</think>\n<answer>2</answer>"


@pytest.mark.parametrize(
    ("settings", "completion", "right"),
    [
        ({}, GOOD, True),
        ({}, f"  {GOOD}\n", True),
        ({}, GOOD + " and more", False),
        ({}, "well " + GOOD, False),
        ({}, GOOD + GOOD, False),
        ({}, GOOD.replace("</think>", "</think> so "), False),
        ({}, "<think> </think><answer>2</answer>", False),
        ({}, "<think>x</think><answer></answer>", False),
        ({}, "<answer>2</answer><think>x</think>", False),
        ({}, "<think>x<answer>2</answer></think>", False),
        ({}, "", False),
        ({"think_in_prompt": True}, GOOD.removeprefix("<think>"), True),
        ({"think_in_prompt": True}, GOOD, False),
        ({"form": "think"}, "<think>x</think> 2", True),
        ({"form": "think"}, "<think>x</think>", False),
        ({"form": "think"}, "2", False),
        ({"form": "answer"}, "well <answer>2</answer>", True),
        ({"form": "answer"}, "well <answer>2</answer> more", False),
        ({"form": "answer"}, "well", False),
        ({"form": "boxed"}, r"so \boxed{2}", True),
        ({"form": "boxed"}, r"so \boxed{2", False),
        ({"form": "boxed"}, r"<think>\boxed{2}?</think> Two.", False),
        ({"form": "boxed"}, r"<think>\boxed{2}?</think> \boxed{3}", True),
        ({"form": "pattern", "pattern": r"a.*b"}, "a\nb", True),
        ({"form": "pattern", "pattern": r"a.*b"}, "a\nb\n", False),
    ],
)
def test_format(settings, completion, right):
    reward = FormatConfig(**settings, min_value=-0.5, scale=2.0).build()
    assert reward(sample(completion)) == (2.0 if right else -1.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} and", r"\frac{1}{2}"),
        (r"\fbox{1} \fboxed{2}", "2"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{a\boxed{b}}", "b"),
        (r"\boxed{a\boxed{b} c", "b"),
        (r"} \boxed{1} }", "1"),
        (r"\boxed{1\}", None),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_last_boxed(text, found):
    assert last_boxed(text) == found


@pytest.mark.timeout(60)  # which quadratic work exceeds many times
def test_boxes_that_are_never_closed_are_none():
    # Nothing limits the time of `form: boxed`, and a model must not escape by it.
    assert last_boxed(r"\boxed{" * 300_000) is None


@given(st.text(alphabet="{}\\boxed1<answer>/ \n`", max_size=60))
def test_extraction_takes_any_text(text):
    for extract in (last_boxed, last_answer, last_line, code_block):
        found = extract(text)
        assert found is None or found in text


@given(st.text(alphabet=st.characters(exclude_characters="{}\\")))
def test_a_box_gives_back_what_was_put_in(text):
    assert last_boxed(f"so \\boxed{{{text}}}.") == text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\na\n```\nor\n```python\nb\n```\n```text\nc\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```python\nx = 1", None),
        ("x = 1", None),
        ("1.\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ('```python\ns = """\n  ```\n"""\nx\n```\n', 's = """\n  ```\n"""\nx\n'),
        ("````python\n```\n````", "```\n"),
        ("~~~py\nx\n~~~", "x\n"),
        ("``` Python3.11 title=a.py\nx\n```\n```pycon\ny\n```\n```python4\nz\n```", "x\n"),
        ("```python\nx\n  ```", "x\n"),
    ],
)
def test_code_block(text, found):
    assert code_block(text) == found


@pytest.mark.parametrize("line", ["```python\n", "~~~~\n", "```python\n    ```\n"])
@pytest.mark.timeout(60)  # which quadratic work exceeds many times
def test_fences_that_are_never_closed_hold_nothing_up(line):
    assert code_block(line * 90_000) == code_block(line * 2)


def test_references_become_text():
    assert references([1, 2.5, "x"]) == ["1", "2.5", "x"]
    # Where one answer of a column is missing, pandas makes the whole numbers fractions.
    assert references([5.0, -12.0, "5.0"]) == ["5.0", "5", "-12.0", "-12", "5.0"]
    assert references([1e-05, -2.5e-07, 1e16]) == ["0.00001", "-0.00000025", "10000000000000000"]
