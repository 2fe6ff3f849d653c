"""The messages of single-pass pipelines: a batch, where its outputs wait, its results. Part of `wire.api`.

`Work` -> `Parked` -> `Fetch` -> ... -> `Results`; inputs and results travel in the message, what lies
between two stages stays with its producer until the consumer fetches it.
"""

from __future__ import annotations

from keystage.wire.shapes import Message, TensorRef


class Parked(Message, frozen=True, array_like=True, tag=True):
    """Outputs of a single-pass stage wait at their producer for a late-bound successor.

    Attributes:
        replica: the producer.
        stage: stage that produced them, the last one that the batch passed here.
        sessions: items.
        epochs: epoch of each item.
        refs: where each output lies (one ring slot each).
        started_s: seconds between receipt of the batch and start of compute.
        compute_s: seconds of compute for the whole batch.
    """

    replica: str
    stage: int
    sessions: list[int]
    epochs: list[int]
    refs: list[TensorRef]
    started_s: float
    compute_s: float


class Results(Message, frozen=True, array_like=True, tag=True):
    """Outputs of the last stage of a single-pass pipeline, bytes inline.

    Attributes are those of `Parked`; `payloads` holds the raw bytes of each output and
    `dtype`/`shapes` describe them.
    """

    replica: str
    stage: int
    sessions: list[int]
    epochs: list[int]
    dtype: str
    shapes: list[tuple[int, ...]]
    payloads: list[bytes]
    started_s: float
    compute_s: float


class Work(Message, frozen=True, array_like=True, tag=True):
    """A batch for the first stage of a single-pass pipeline, inputs inline.

    Attributes:
        stage: first stage to run, 0.
        last: last stage to run, the receiver hosting all between.
        sessions: items.
        epochs: epoch of each.
        dtype: element type of the inputs.
        shapes: shape of each input.
        payloads: raw bytes of each input.
        more: whether the pipeline has a stage after `last` (False: answer with `Results`).
    """

    stage: int
    last: int
    sessions: list[int]
    epochs: list[int]
    dtype: str
    shapes: list[tuple[int, ...]]
    payloads: list[bytes]
    more: bool


class Fetch(Message, frozen=True, array_like=True, tag=True):
    """A batch for a later stage: take each input from the producer that parked it.

    Attributes:
        stage: first stage to run.
        last: last stage to run, the receiver hosting all between.
        sessions: items.
        epochs: epoch of each.
        refs: where each input lies.
        producers: inbox endpoint of each producer, for the `Ack`.
        more: whether a stage follows after `last`.
    """

    stage: int
    last: int
    sessions: list[int]
    epochs: list[int]
    refs: list[TensorRef]
    producers: list[str]
    more: bool
