"""Log-probs without padding and without all logits, against the plain computation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.trainers import forward_inputs as layouts
from rlinf.trainers.forward_inputs import layout_of
from rlinf.trainers.language_trainers import text_batch
from rlinf.trainers.scoring import TokenScorer, token_log_probs
from tests.trainers.language_models import (
    LENGTH,
    PROMPT,
    VOCABULARY,
    model,
    naive_log_probs,
    random_batch,
)

CPU = torch.device("cpu")


def scores(of, batch, *, packing, temperature=1.0, logits_per_chunk=1 << 20):
    scorer = TokenScorer(of, packing=packing, logits_per_chunk=logits_per_chunk).eval()
    return scorer(batch, temperature=temperature).log_probs


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", True), ("qwen2", False), ("qwen3", True), ("llama", False)]
)
def test_log_probs_equal_those_of_each_sequence_alone(family, tied, packing):
    batch = random_batch()
    expected = naive_log_probs(model(family, tied=tied), batch, 0.7)
    found = scores(model(family, tied=tied), batch, packing=packing, temperature=0.7)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert bool((found[batch.mask == 0] == 0).all())


def test_gradients_without_padding_equal_those_with_it():
    batch, weight = random_batch(), torch.randn(12, LENGTH)
    gradients = []
    for packing in (True, False):
        one = model()
        (scores(one, batch, packing=packing) * weight).sum().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-5, rtol=1e-4)


def test_sequences_do_not_see_each_other():
    batch = random_batch()
    ids = batch.inputs["input_ids"].clone()
    ids[1:] = torch.where(batch.inputs["attention_mask"][1:], (ids[1:] + 5) % VOCABULARY, 0)
    changed = replace(batch, inputs={**batch.inputs, "input_ids": ids})
    one, other = (scores(model(), b, packing=True) for b in (batch, changed))
    torch.testing.assert_close(one[0], other[0], atol=1e-6, rtol=0)
    assert bool((one[1:] != other[1:])[batch.mask[1:] > 0].any())


def test_sequences_of_very_different_lengths_are_attended_apart(monkeypatch):
    monkeypatch.setattr(layouts, "_SHORT", 3)
    batch = random_batch(20)
    layout = layout_of(batch, packing=True, device=CPU)
    assert layout.arrangement is not None
    assert len(layout.arrangement.shapes) > 1
    found = scores(model(), batch, packing=True)
    torch.testing.assert_close(found, naive_log_probs(model(), batch), atol=1e-5, rtol=0)


def test_tokens_in_the_middle_of_a_response_may_not_count():
    """As those that a tool wrote."""
    batch = random_batch()
    mask = batch.mask.clone()
    mask[:, 1] = 0
    found = scores(model(), replace(batch, mask=mask), packing=True)
    whole = naive_log_probs(model(), batch)
    torch.testing.assert_close(found, whole * mask, atol=1e-5, rtol=0)


def test_only_what_is_looked_at_is_computed():
    batch = text_batch([([5, 6, 7], [8, 9]), ([5], [6, 7, 8])])
    layout = layout_of(batch, packing=True, device=CPU)
    assert layout.tokens == 4 + 3
    assert sorted(layout.targets.tolist()) == [6, 7, 8, 8, 9]


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_prompt_is_computed_once_for_its_group(group_size):
    batch = random_batch(group_size=group_size)
    layout = layout_of(batch, packing=True, device=CPU)
    prompts = batch.inputs["attention_mask"][:, :PROMPT].sum(dim=1)
    # The last token of a sequence is before none.
    answers = batch.mask.sum(dim=1) - 1
    assert layout.tokens == int((prompts + answers).sum())
    assert layout.input_ids.numel() == int(prompts[::group_size].sum() + answers.sum())
    assert layout_of(batch, packing=False, device=CPU).input_ids.numel() > layout.tokens


def test_prompts_are_told_apart_by_tokens_and_columns():
    """The tokens 5 and 6 after padding, before it, and with another one."""
    ids = torch.tensor([[0, 5, 6, 7], [0, 5, 6, 8], [5, 6, 0, 7], [4, 5, 6, 7]])
    batch = replace(
        random_batch(4),
        inputs={"input_ids": ids, "attention_mask": ids > 0},
        mask=torch.ones(4, 1),
    )
    layout = layout_of(batch, packing=True, device=CPU)
    assert layout.input_ids.numel() == 2 + 2 + 3
    assert layout.tokens == 2 + 2 + 2 + 3


def test_first_token_cannot_be_scored():
    batch = random_batch()
    attended = batch.inputs["attention_mask"].clone()
    attended[0, :PROMPT] = False
    changed = replace(batch, inputs={**batch.inputs, "attention_mask": attended})
    with pytest.raises(ValueError, match="it needs a prompt"):
        layout_of(changed, packing=True, device=CPU)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_change_neither_values_nor_gradients(temperature):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50)
    hidden = torch.randn(23, 8, requires_grad=True)
    targets = torch.randint(0, 50, (23,))
    results = []
    for logits_per_chunk in (10_000, 50 * 4, 1):
        log_probs, entropy = token_log_probs(
            hidden=hidden,
            head=head,
            targets=targets,
            temperature=temperature,
            entropy=True,
            logits_per_chunk=logits_per_chunk,
        )
        gradient = torch.autograd.grad((log_probs * targets + entropy).sum(), [hidden, head.weight])
        results.append((log_probs, entropy, *gradient))
    full = (head(hidden) / temperature).log_softmax(-1)
    torch.testing.assert_close(results[0][0], full.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(
        results[0][1], torch.distributions.Categorical(logits=full).entropy()
    )
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_only_one_chunk_of_logits_exists_at_a_time():
    sizes = []

    class Head(torch.nn.Linear):
        def forward(self, rows):
            sizes.append(len(rows))
            return super().forward(rows)

    head = Head(8, 50)
    log_probs, _ = token_log_probs(
        hidden=torch.randn(23, 8, requires_grad=True),
        head=head,
        targets=torch.zeros(23, dtype=torch.int64),
        temperature=1.0,
        entropy=False,
        logits_per_chunk=500,
    )
    log_probs.sum().backward()
    assert sizes == [10, 10, 3, 3, 10, 10]


def test_a_short_window_is_refused_without_padding():
    def windowed():
        return model(use_sliding_window=True, sliding_window=4, max_window_layers=0)

    batch = random_batch()
    with pytest.raises(ConfigError, match=r"packing: .*sliding_window.*nearest: false"):
        scores(windowed(), batch, packing=True)
    found = scores(windowed(), batch, packing=False)
    torch.testing.assert_close(found, naive_log_probs(windowed(), batch), atol=1e-5, rtol=0)


def test_changed_logits_are_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        TokenScorer(Gemma2ForCausalLM(config), packing=False, logits_per_chunk=100)
