"""Generated tasks: right answers, disjoint splits, the same items from the same seed."""

import itertools
import random
import re

import pytest

from rlinf.config.validate import validate
from rlinf.data.tasks import (
    REGISTRY,
    ArithmeticTask,
    ReversalTask,
    SortingTask,
    apportion,
    column_differences,
    column_sums,
    make_item,
    split_of,
)
from rlinf.errors import ConfigError
from rlinf.rewards.protocol import RewardInput
from rlinf.rewards.text import ExactMatchConfig

CONFIGS = [
    ArithmeticTask(levels=(2, 3, 4, 5), size=200, held_out=60),
    SortingTask(levels=(3, 8), size=200, held_out=60),
    ReversalTask(levels=(3, 8), size=200, held_out=60),
]
by_type = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)


def solution(prompt):
    """The answer, found in another way than the task finds it."""
    if prompt[0] in "~=":
        word = prompt[1:-1]
        return "".join(reversed(word)) if prompt[0] == "~" else word
    if re.fullmatch(r"\d+=", prompt):
        return "".join(digit * prompt.count(digit) for digit in "0123456789")
    return str(eval(prompt.removesuffix("="), {"__builtins__": {}}))


@by_type
def test_answers_are_right_and_targets_end_in_them(config):
    for item in (*config.items("train"), *config.items("held_out")):
        assert item.answer == solution(item.prompt)
        assert item.target.endswith(f"<answer>{item.answer}</answer>")


@pytest.mark.parametrize("digits", [1, 3, 7])
def test_large_numbers_with_steps_and_with_a_tool(digits):
    config = ArithmeticTask(levels=(6,), digits=digits, size=60, held_out=8)
    items = config.items("train")
    assert all(item.answer == solution(item.prompt) for item in items)
    assert {sign for sign in "+-*" for item in items if sign in item.prompt} == set("+-*")
    longest = max(len(number) for item in items for number in re.findall(r"\d+", item.prompt))
    assert longest == digits
    for item in items:
        if "*" in item.prompt and digits > 1:
            rows = item.target.partition("<")[0].split()
            product = sum(int(row) * 10**place for place, row in enumerate(rows))
            assert product == int(item.answer)
    calling = config.model_copy(update={"calls": "calc"}).items("train")
    assert [item.prompt for item in calling] == [item.prompt for item in items]
    for item in calling:
        call = f"<calc>{item.prompt.removesuffix('=')}</calc>"
        assert item.target == f"{call}<answer>{item.answer}</answer>"


def test_sums_and_differences_of_one_digit():
    items = ArithmeticTask(levels=(1,), size=120, held_out=8).items("train")
    assert all(item.answer == solution(item.prompt) for item in items)
    assert {item.prompt[1] for item in items} == {"+", "-"}


@by_type
def test_the_target_earns_the_reward_and_another_answer_does_not(config):
    reward = ExactMatchConfig().build()
    for item in config.items("held_out")[:20]:
        wrong = item.target.replace(f">{item.answer}<", f">{item.answer}1<")
        for completion, value in ((item.target, 1.0), (wrong, 0.0)):
            sample = RewardInput(
                prompt=item.prompt, completion=completion, num_tokens=9, answer=[item.answer]
            )
            assert reward(sample) == value


@by_type
def test_sets_are_disjoint_whatever_seed_and_size(config):
    sets = [
        {item.prompt for item in config.model_copy(update=changes).items(split)}
        for split in ("train", "held_out")
        for changes in ({}, {"seed": 1}, {"size": 150, "held_out": 90})
    ]
    for training, held_out in itertools.product(sets[:3], sets[3:]):
        assert not training & held_out


@by_type
def test_items_are_all_different_and_a_function_of_the_seed(config):
    items = config.items("train")
    assert len({item.prompt for item in items}) == len(items) == config.size
    assert items == config.items("train")
    assert items != config.model_copy(update={"seed": 1}).items("train")


def test_the_items_of_a_seed_never_change():
    """Recorded runs refer to these prompts: a change here makes their results incomparable."""
    first = [config.items("held_out")[0] for config in CONFIGS]
    assert [(item.prompt, item.target, item.level) for item in first] == RECORDED


RECORDED = [
    ("8+1+1+1+3=", "9 10 11 <answer>14</answer>", 4),
    ("01516749=", "<answer>01145679</answer>", 8),
    ("~fbkjfgcm:", "<answer>mcgfjkbf</answer>", 8),
]


@by_type
def test_levels_have_their_shares_and_are_mixed(config):
    few, many = config.levels[0], config.levels[-1]
    mixed = config.model_copy(update={"levels": (few, many), "shares": (1.0, 3.0), "size": 100})
    levels = [item.level for item in mixed.items("train")]
    assert (levels.count(few), levels.count(many)) == (25, 75)
    assert levels != sorted(levels)


def test_one_prompt_of_eight_is_held_out():
    held_out = sum(split_of(make_item(f"{number}=", "", 1)) == "held_out" for number in range(8000))
    assert abs(held_out - 1000) < 4 * (8000 * 7 / 64) ** 0.5


@pytest.mark.parametrize("digits", [1, 2, 3, 5])
def test_columns_give_the_result(digits):
    numbers = random.Random(digits)
    for _ in range(200):
        a, b = sorted((numbers.randrange(10**digits) for _ in range(2)), reverse=True)
        sums, differences = column_sums(a, b, digits), column_differences(a, b, digits)
        assert int(f"{sums[-1]}" + "".join(str(column % 10) for column in sums[-2::-1])) == a + b
        assert int("".join(map(str, differences[::-1]))) == a - b
        assert all(0 <= column <= 9 for column in differences)


def test_worked_solutions_can_be_left_out():
    config = ArithmeticTask(levels=(3, 4, 5), size=60, held_out=9)
    bare = config.model_copy(update={"worked": False}).items("train")
    for item, plain in zip(config.items("train"), bare, strict=True):
        assert item.prompt == plain.prompt
        assert plain.target == f"<answer>{plain.answer}</answer>" != item.target
    example = {item.level: item for item in config.items("train")}
    terms = [int(term) for term in example[4].prompt.removesuffix("=").split("+")]
    totals = [*itertools.accumulate(terms)][1:-1]
    assert example[4].target.partition("<")[0].split() == [str(total) for total in totals]
    assert make_item("a", "b", 1, steps="c ").target == "c <answer>b</answer>"


def test_a_level_with_too_few_prompts_is_refused_with_their_number():
    config = ArithmeticTask(levels=(1,), size=150)
    with pytest.raises(ConfigError) as error:
        config.check()
    there_are = int(re.search(r"nearest: (\d+) of this level", str(error.value))[1])
    assert error.value.key == "size"
    assert 0 < there_are < 150
    enough = config.model_copy(update={"size": there_are, "held_out": 155 - there_are})
    enough.check()
    with pytest.raises(ConfigError, match="held_out: level 1 of arithmetic"):
        enough.model_copy(update={"held_out": 156 - there_are}).check()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"levels": [9]}, "arithmetic has no level 9, but 1 to 6; nearest: 6"),
        ({"levels": []}, "levels"),
        ({"levels": [2, 2]}, "names a level twice"),
        ({"levels": [1, 2], "shares": [1.0]}, "has 1 numbers for 2 levels"),
        ({"shares": [0.0]}, "shares"),
        ({"size": 0}, "size"),
    ],
)
def test_illegal_configs_say_why(data, reason):
    with pytest.raises(ConfigError, match=reason):
        validate(ArithmeticTask, data, "test")


def test_every_registered_task_can_be_built():
    for name in REGISTRY.names():
        config = REGISTRY.load(name)(size=20, held_out=5)
        config.check()
        assert config.type == name
        assert len(config.items("train")) == 20


def test_apportioning_keeps_the_sum():
    assert apportion(10, (1.0, 1.0, 1.0)) == [4, 3, 3]
    assert apportion(7, (0.5, 0.25, 0.25)) == [3, 2, 2]
    for count in range(40):
        assert sum(apportion(count, (0.3, 0.3, 0.4, 1e-9))) == count
