"""Rectangular batches: where each token lies, and that nothing of the groups is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.sequences import Completion, PromptGroup, Score, assemble_sequences

PAD = 99


def completion(tokens, version=0, stop="stop"):
    n = len(tokens)
    return Completion(
        tokens=np.array(tokens, np.int64),
        log_probs=-np.arange(1, n + 1, dtype=np.float32),
        versions=np.arange(version, version + n),
        stop_reason=stop,
        seed=0,
    )


def group(draw, prompt, answers, scores=None):
    scores = scores or tuple(Score(reward=float(i)) for i in range(len(answers)))
    tokens = np.array(prompt, np.int64)
    return PromptGroup(prompt_id=7, draw=draw, prompt_tokens=tokens, answer=None,
                       completions=tuple(answers), scores=scores)  # fmt: skip


def test_two_groups_by_hand():
    scores = (Score(reward=1.0), Score(reward=float("nan"), valid=False, reason="time"))
    groups = [
        group(4, [1, 2], [completion([5, 6, 7], 3), completion([8], 3, "length")], scores),
        group(5, [3, 4, 5], [completion([9, 9])]),
    ]
    arrays = assemble_sequences(groups, pad_id=PAD)
    assert arrays["input_ids"].tolist() == [
        [PAD, 1, 2, 5, 6, 7],
        [PAD, 1, 2, 8, PAD, PAD],
        [3, 4, 5, 9, 9, PAD],
    ]
    assert arrays["attention_mask"].astype(int).tolist() == [
        [0, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
    ]
    assert arrays["mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert arrays["log_probs"].tolist() == [[-1, -2, -3], [-1, 0, 0], [-1, -2, 0]]
    assert arrays["versions"].tolist() == [[3, 4, 5], [3, 3, 3], [0, 1, 1]]
    assert arrays["rewards"].tolist() == [1, 0, 0]
    assert arrays["valid"].tolist() == [True, False, True]
    assert arrays["truncated"].tolist() == [False, True, False]
    assert arrays["groups"].tolist() == [4, 4, 5]


def test_the_fields_are_those_of_a_token_batch():
    import torch

    from rlinf.algorithms.batch import Batch

    arrays = assemble_sequences([group(0, [1], [completion([2])])], pad_id=PAD)
    columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
    inputs = {name: columns.pop(name) for name in ("input_ids", "attention_mask")}
    batch = Batch(inputs=inputs, **columns)
    kinds = {name: column.dtype for name, column in columns.items()}
    floats = {"mask", "log_probs", "rewards"}
    flags = {"truncated", "valid"}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == floats
    assert {name for name, kind in kinds.items() if kind == torch.bool} == flags
    assert (
        batch.inputs["input_ids"].dtype == batch.groups.dtype == batch.versions.dtype == torch.int64
    )


tokens = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(st.lists(st.tuples(tokens, st.lists(tokens | st.just([]), min_size=1, max_size=3)),
                min_size=1, max_size=4),
       )  # fmt: skip
def test_every_sequence_can_be_read_back(spec):
    groups = [
        group(i, prompt, [completion(answer, i) for answer in answers])
        for i, (prompt, answers) in enumerate(spec)
    ]
    p = max(len(prompt) for prompt, _ in spec)
    r = max(1, *(len(answer) for _, answers in spec for answer in answers))
    arrays = assemble_sequences(groups, pad_id=PAD)
    assert arrays["input_ids"].shape == (len(arrays["mask"]), p + r)
    assert arrays["mask"].shape == arrays["versions"].shape == (len(arrays["mask"]), r)
    flat = [(g, c) for g in groups for c in g.completions]
    for row, (g, c) in enumerate(flat):
        whole = np.concatenate([g.prompt_tokens, c.tokens])
        attended = arrays["attention_mask"][row]
        sampled = arrays["mask"][row].astype(bool)
        np.testing.assert_array_equal(arrays["input_ids"][row][attended], whole)
        np.testing.assert_array_equal(arrays["input_ids"][row][p:][sampled], c.tokens)
        np.testing.assert_array_equal(arrays["log_probs"][row][sampled], c.log_probs)
        np.testing.assert_array_equal(arrays["versions"][row][sampled], c.versions)
        assert (arrays["input_ids"][row][~attended] == PAD).all()


def test_what_cannot_be_assembled_is_refused():
    with pytest.raises(ValueError, match="no completion"):
        assemble_sequences([], pad_id=PAD)
    unscored = PromptGroup(prompt_id=0, draw=0, prompt_tokens=np.array([1]), answer=None,
                           completions=(completion([1]),))  # fmt: skip
    with pytest.raises(ValueError, match="no scores"):
        assemble_sequences([unscored], pad_id=PAD)
    with pytest.raises(ValueError, match="interrupted"):
        assemble_sequences([group(0, [1], [completion([1], stop="abort")])], pad_id=PAD)
