"""What a composition costs, as functions of arrays of any shape.

The executor gives every node one lease per step. Nodes that share a device therefore run one after
the other, each with all of its items (*temporal*); nodes on separate devices run at the same time,
in chunks of ``m`` of the ``M`` items (*spatial*). With ``K = M/m`` chunks, a part of a flow is
described by what it does to a stream of chunks:

    first   time from its first input chunk to its first output chunk
    period  time between chunks that it can keep up; ``head`` at its input, ``tail`` at its output
    single  whether both are the same, so that a slow input only slows the output; otherwise there
            is a barrier inside: the output begins when all input was taken

Four forms are needed, by which ends are streams:

    closed  both ends at rest: ``first`` is the whole time
    out     the input is complete, the output streams
    into    the input streams, the output is complete when all is done
    through both ends stream

With the parts S and T, in the order of the flow (paper: RLinf, arXiv 2509.15965, whose recursion
over cuts this follows; the forms with a barrier inside extend it):

    temporal, closed   T_S + T_T
    spatial, closed    first_S + first_T + (K − 1) · max(tail_S, head_T)

The switch (offload and reload) is part of the time of each node that is offloaded while idle.
Parts without an edge between them run side by side; each value is then at most the larger one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Form = Literal["closed", "out", "into", "through"]
Kind = Literal["temporal", "spatial", "parallel"]

# Forms of the two parts by the form of the whole and the kind of its composition.
PARTS: dict[tuple[Kind, Form], tuple[Form, Form]] = {
    ("temporal", "closed"): ("closed", "closed"),
    ("temporal", "out"): ("closed", "out"),
    ("temporal", "into"): ("into", "closed"),
    ("temporal", "through"): ("into", "out"),
    ("spatial", "closed"): ("out", "into"),
    ("spatial", "out"): ("out", "through"),
    ("spatial", "into"): ("through", "into"),
    ("spatial", "through"): ("through", "through"),
    ("parallel", "closed"): ("closed", "closed"),
    ("parallel", "out"): ("out", "out"),
    ("parallel", "into"): ("into", "into"),
    ("parallel", "through"): ("through", "through"),
}


class Stream(NamedTuple):
    """Times of parts of a flow [s]; a value that a form does not have is 0."""

    first: Floats
    head: Floats
    tail: Floats
    single: NDArray[np.bool_]

    def take(self, indices: NDArray[np.int64]) -> Stream:
        """The entries at some indices."""
        return Stream._make(column[indices] for column in self)


def single_node(form: Form, chunk: Floats, switch: Floats, chunks: int) -> Stream:
    """A single node that takes ``chunk`` seconds per chunk, and ``switch`` once.

    What is spent once is to load, to offload, and, where all items are served at once, to wait for
    the first result.
    """
    none = np.zeros_like(chunk)
    period = chunk if chunks > 1 else none  # a single chunk has no pace
    return Stream(
        first=chunk + switch,
        head=period if form in ("into", "through") else none,
        tail=period if form in ("out", "through") else none,
        single=np.full(chunk.shape, form == "through"),
    )


def compose(kind: Kind, form: Form, left: Stream, right: Stream, chunks: int) -> Stream:
    """Times of a composition of the whole ``form``; the parts have those that ``PARTS`` names.

    ``chunks`` is K, the number of chunks of the stream between the parts, or through both.
    """
    if kind == "temporal":
        return Stream(left.first + right.first, left.head, right.tail, np.zeros_like(left.single))
    if kind == "parallel":
        first, head, tail = (np.maximum(a, b) for a, b in zip(left[:3], right[:3], strict=True))
        return Stream(first, head, tail, left.single & right.single)
    # A single part on either side passes a slow input, or is paced by it; where both ends of the
    # hand-over are beyond a barrier, all chunks are handed over before anything goes on.
    ends_left = ~left.single | (form in ("closed", "out"))
    ends_right = ~right.single | (form in ("closed", "into"))
    handing_over = np.maximum(left.tail, right.head)
    waits = np.where(ends_left & ends_right, (chunks - 1) * handing_over, 0.0)
    return Stream(
        first=left.first + right.first + waits,
        head=np.where(ends_left, left.head, handing_over),
        tail=np.where(ends_right, right.tail, handing_over),
        single=~ends_left & ~ends_right,
    )


def least_total(form: Form, stream: Stream, chunks: int) -> Floats:
    """Least time of any step that contains the part."""
    if form == "closed":
        return stream.first
    periods = np.where(stream.single, stream.head, stream.head + stream.tail)
    return np.asarray(stream.first + (chunks - 1) * periods)


def loop_seconds(
    seconds: list[Floats],
    shared: list[list[int]],
    *,
    exchanges: int,
    stages: int,
    flowing: bool,
    closing: list[Floats] | None = None,
    between: Floats | float = 0.0,
) -> Floats:
    """Time of a loop whose stages feed each other.

    One pass of a sub-batch through stage ``i`` takes ``a_i = seconds_i / (S · E)`` for ``S``
    sub-batches in flight and ``E`` exchanges. Let ``A = Σ a_i`` and ``L`` be the largest sum of
    ``a_i`` over stages on the same devices. An exchange of all sub-batches takes the cycle time
    ``max(S · L, A)``: the busiest devices serve every sub-batch, and a sub-batch cannot be sent
    again before it is back. The last exchange drains:

        (E − 1) · max(S · L, A) + A + (S − 1) · L

    On the same devices that is ``Σ seconds_i``; with two stages on separate devices and S ≥ 2 it is
    ``max(seconds) + min(seconds) / (S · E)``.

    What the stages do once, after the last exchange (a policy gives the values of everything that
    it saw), is a further pass with times ``c_i = closing_i / S`` and the sums C and K for A and L:
    the drain then takes ``(S − 1) · max(L, K)``, and ``C`` is added. Each exchange wakes every
    stage, which adds ``between`` to A; where all share their devices, these wait for what of it is
    longer than the last stage's work for the other sub-batches. The first stage of a loop sends
    without work what the others begin with, so it is the last of a pass.

    Args:
        seconds: Time of each stage for the whole step [s].
        shared: Indices of stages, by the devices that they share.
        exchanges: E.
        stages: S, ``pipeline_stage_num``.
        flowing: Whether a stage serves all items at once, so that no item waits for the others:
            the exchanges then follow each other without a bound on those in flight.
        closing: Part of each of these times that is spent once, after the last exchange [s].
        between: Time of an exchange of one sub-batch in which no stage works [s].
    """
    units = exchanges * stages
    if flowing or closing is None:
        closing = [np.zeros_like(s) for s in seconds]
    per_unit = [(s - once) / units for s, once in zip(seconds, closing, strict=True)]
    through, busiest = _passed(per_unit, shared)
    through = through + between
    if flowing:
        return np.asarray((units - 1) * busiest + through)
    if len(shared) == 1:
        idle = np.maximum(between - (stages - 1) * per_unit[0], 0.0)
        return np.asarray(sum(seconds[1:], seconds[0]) + exchanges * idle)
    last, longest = _passed([once / stages for once in closing], shared)
    cycle = np.maximum(stages * busiest, through)
    drained = through + last + (stages - 1) * np.maximum(busiest, longest)
    _, least = _passed(seconds, shared)
    return np.asarray(np.maximum((exchanges - 1) * cycle + drained, least))


def _passed(seconds: list[Floats], shared: list[list[int]]) -> tuple[Floats, Floats]:
    """Sum over all stages, and the largest sum over stages on the same devices."""
    blocks = [sum((seconds[i] for i in block[1:]), seconds[block[0]]) for block in shared]
    return sum(seconds[1:], seconds[0]), np.max(np.stack(blocks), axis=0)
