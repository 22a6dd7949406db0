"""Tokens are drawn from the distribution that the settings name, by seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rlinf.engines.sampling import Draw, Filters, draw_tokens, uniforms

ROWS = 40_000


def _uniforms(rows: int, seed: int = 0) -> torch.Tensor:
    positions = np.arange(rows)
    return torch.from_numpy(uniforms(np.full(rows, seed, np.uint64), positions))


def test_uniform_numbers_are_uniform_and_independent() -> None:
    along = uniforms(np.full(ROWS, 7, np.uint64), np.arange(ROWS))
    across = uniforms(np.arange(ROWS, dtype=np.uint64), np.full(ROWS, 7))
    for drawn in (along, across):
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert stats.kstest(drawn, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(along, across)[0, 1]) < 0.02


def test_a_uniform_number_depends_on_its_seed_and_position_alone() -> None:
    seeds, positions = np.array([3, 9, 2**64 - 1], np.uint64), np.array([0, 5, 10**6])
    together = uniforms(seeds, positions)
    for row in range(3):
        alone = uniforms(seeds[row : row + 1], positions[row : row + 1])
        assert alone[0] == together[row]


@pytest.mark.parametrize("temperature", [None, 0.5, 2.0])
def test_frequencies_are_the_probabilities(temperature: float | None) -> None:
    logits = torch.tensor([1.0, -0.5, 0.3, -3.0, 0.0])
    scale = None if temperature is None else torch.full((ROWS, 1), temperature)
    draw = Draw(uniforms=_uniforms(ROWS), temperature=scale)
    tokens, log_probs = draw_tokens(logits.expand(ROWS, 5), draw)
    expected = (logits / (temperature or 1.0)).log_softmax(-1)
    counts = torch.bincount(tokens, minlength=5).numpy()
    assert stats.chisquare(counts, ROWS * expected.double().softmax(-1).numpy()).pvalue > 1e-3
    assert torch.allclose(log_probs, expected[tokens])


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    edges = torch.tensor([0.0, 0.5, 1 - 2.0**-40], dtype=torch.float64)
    tokens, _ = draw_tokens(logits.expand(3, 5), Draw(uniforms=edges))
    assert tokens.tolist() == [1, 3, 3]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("by", ["top_k", "top_p"])
def test_filtered_rows_are_drawn_at_their_temperature(by: str, temperature: float) -> None:
    logits = torch.log(torch.tensor([0.4, 0.05, 0.25, 0.2, 0.1]))
    scaled = (logits.double() / temperature).softmax(-1)
    kept = {"top_k": 3, "top_p": 3 if temperature < 1 else 4}[by]
    # The sum to draw from is between that of so many tokens and that of one fewer.
    ordered = scaled.sort(descending=True)
    bound = float(ordered.values.cumsum(-1)[kept - 2 : kept].mean())
    filters = Filters(
        rows=torch.arange(ROWS),
        seen=None,
        penalty=torch.ones(ROWS, 1),
        banned=None,
        top_k=torch.full((ROWS, 1), kept if by == "top_k" else 5),
        top_p=torch.full((ROWS, 1), bound if by == "top_p" else 1.0),
    )
    scale = torch.full((ROWS, 1), temperature)
    draw = Draw(uniforms=_uniforms(ROWS), temperature=scale, filters=filters)
    tokens, log_probs = draw_tokens(logits.expand(ROWS, 5), draw)
    counts = torch.bincount(tokens, minlength=5)[ordered.indices].numpy()
    assert not counts[kept:].any()
    expected = ordered.values[:kept] / ordered.values[:kept].sum()
    assert stats.chisquare(counts[:kept], ROWS * expected.numpy()).pvalue > 1e-3
    assert torch.allclose(log_probs.double(), scaled.log()[tokens], atol=1e-5)


def _drawn_under(
    logits: torch.Tensor, **change: torch.Tensor | None
) -> tuple[set[int], np.ndarray]:
    """The tokens that occur when one filter is on, and their log-probs by token."""
    rows, size = 4000, len(logits)
    plain: dict[str, torch.Tensor | None] = {
        "seen": None,
        "penalty": torch.ones(rows, 1),
        "banned": None,
        "top_k": torch.full((rows, 1), size),
        "top_p": torch.ones(rows, 1),
    }
    filters = Filters(rows=torch.arange(rows), **{**plain, **change})  # type: ignore[arg-type]
    draw = Draw(uniforms=_uniforms(rows), filters=filters)
    tokens, log_probs = draw_tokens(logits.expand(rows, size), draw)
    by_token = np.zeros(size)
    by_token[tokens.numpy()] = log_probs.numpy()
    return set(tokens.tolist()), by_token


LOGITS = torch.log(torch.tensor([0.4, 0.05, 0.25, 0.2, 0.1]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"top_k": torch.full((4000, 1), 2)}, {0, 2}),
        ({"top_p": torch.full((4000, 1), 0.6)}, {0, 2}),
        ({"top_p": torch.full((4000, 1), 0.7)}, {0, 2, 3}),
        ({"top_p": torch.full((4000, 1), 0.01)}, {0}),
        ({"banned": torch.tensor([[True, False, False, True, False]]).expand(4000, 5)}, {1, 2, 4}),
    ],
)
def test_filters_leave_tokens_out_and_scores_as_they_were(
    change: dict[str, torch.Tensor], expected: set[int]
) -> None:
    found, log_probs = _drawn_under(LOGITS, **change)
    assert found == expected
    for token in found:
        assert log_probs[token] == pytest.approx(float(LOGITS[token]), abs=1e-6)


def test_a_penalty_makes_what_occurred_rarer() -> None:
    logits = torch.tensor([[2.0, 2.0, -1.0, -1.0]]).expand(ROWS, 4)
    filters = Filters(
        rows=torch.arange(ROWS),
        seen=torch.tensor([[0, 2, 0]]).expand(ROWS, 3),
        penalty=torch.full((ROWS, 1), 2.0),
        banned=None,
        top_k=None,
        top_p=torch.ones(ROWS, 1),
    )
    tokens, _ = draw_tokens(logits, Draw(uniforms=_uniforms(ROWS), filters=filters))
    expected = torch.tensor([1.0, 2.0, -2.0, -1.0]).double().softmax(-1).numpy()
    counts = torch.bincount(tokens, minlength=4).numpy()
    assert stats.chisquare(counts, ROWS * expected).pvalue > 1e-3


def test_greedy_and_filtered_rows_stand_beside_others() -> None:
    torch.manual_seed(0)
    logits, numbers = torch.randn(6, 9), _uniforms(6)
    plain, _ = draw_tokens(logits, Draw(uniforms=numbers))
    filters = Filters(
        rows=torch.tensor([4]),
        seen=None,
        penalty=torch.ones(1, 1),
        banned=None,
        top_k=torch.tensor([[1]]),
        top_p=torch.ones(1, 1),
    )
    greedy = torch.tensor([False, True, False, False, False, False])
    mixed, _ = draw_tokens(logits, Draw(uniforms=numbers, filters=filters, greedy=greedy))
    best = logits.argmax(-1)
    expected = [int(best[row] if row in (1, 4) else plain[row]) for row in range(6)]
    assert mixed.tolist() == expected
