"""What completions give as their final answers, so that equal ones can be counted as votes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from rlinf.rewards.math_answer import MathConfig, MathReward
from rlinf.rewards.protocol import RewardInput
from rlinf.rewards.text import last_boxed

AnswerKind = Literal["math", "letter"]
"""``math``: a formula, equal to others by value; ``letter``: that of a choice."""

_LETTER = re.compile(
    r"\s*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\s*\(?\s*([A-Za-z])(?![A-Za-z0-9])"
)


def read_answers(texts: Sequence[str], kind: AnswerKind) -> tuple[str | None, ...]:
    """The answers in the last ``\\boxed{…}`` of each text of one prompt, None where there is none.

    Equal ones are written equally, as the first of them. Must run in the main thread, in which
    alone comparing two formulas can be limited in time.
    """
    boxes = [last_boxed(text) for text in texts]
    if kind == "letter":
        return tuple(None if box is None else _letter(box) for box in boxes)
    written = _as_first_written([" ".join(box.split()) for box in boxes if box and box.strip()])
    return tuple(written[" ".join(box.split())] if box and box.strip() else None for box in boxes)


def _letter(box: str) -> str | None:
    found = _LETTER.match(box)
    return None if found is None else found[1].upper()


def _as_first_written(formulas: Sequence[str]) -> dict[str, str]:
    """Each formula with the first one that it equals."""
    reward = MathReward(MathConfig())
    first: dict[str, str] = {}
    for formula in dict.fromkeys(formulas):
        known = dict.fromkeys(first.values())
        first[formula] = next((k for k in known if _equal(reward, formula, k)), formula)
    return first


def _equal(reward: MathReward, formula: str, other: str) -> bool:
    sample = RewardInput(
        prompt="", completion=rf"\boxed{{{formula}}}", num_tokens=0, answer=[other]
    )
    try:
        return reward(sample) > 0
    except ValueError:
        return False  # what cannot be read equals only itself
