"""Predictor `attention`: graph attention over a chain corrects what `qna` predicts (QUART section 5.2).

Before it: `maths.qna` propagates the variation of arrivals; `keystage.training` learned the weights from
simulated chains. After it: the smoother takes either predictor. Inference only, numpy only, no IO: the
shipped weights are a module (`attention_weights`), so that a logged decision is replayed with the code
it was made with, and a decision stays a function of what it is given.

    h_j      = W x_j                                                               per head
    e_ij     = LReLU(a1 . h_i + a2 . h_j) + theta CV_j + role(j - i)               j in {i-1, i, i+1}
    alpha_ij = softmax of e_ij over j;   x'_i = sum_j alpha_ij h_j                 (Eq. 4, 5)
    CV_i     = CV_qna,i exp(f(x'_i, x_i)),  f = L tanh(o . tanh(A [x'_i, x_i] + b) / L + c / L)   (Eq. 6)

x_j are the features below, CV_j the CV `qna` predicts at stage j, L = 1.5. theta is learned, per head.
Deviations: Eq. 4 adds theta CV_i, the same number, to every term of the softmax, so it cancels, and with
one neighbour the softmax is 1 anyway; here it is CV_j, and N(i) holds predecessor, self and successor.
The role term tells the directions of a chain apart, which a graph's neighbours do not have. f is a
correction bounded by a factor exp(1.5) = 4.5 either way, so that nothing outside the data it was
trained on can lead far from the formula. Valid, like `qna`, for open chains in steady state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import numpy as np

from keystage.controller.maths import qna
from keystage.controller.maths.attention_weights import SHIPPED
from keystage.controller.maths.qna import Chains, Floats, Flow, Station

FEATURES = (
    "log_cv",  # log of the CV qna predicts at the stage
    "log_entry_cv",  # log of the CV at the entry of the chain
    "utilisation",  # rho
    "log_spare",  # log(1 - rho + 0.02)
    "passed",  # R: the highest utilisation bursts have passed on their way
    "log_servers",  # log c
    "log_most",  # log b
    "fixed_ratio",  # part of a lone item's service that a batch pays once
    "service_cv",  # sqrt(cs2)
    "log_batch",  # log of the mean batch n
    "log_apart",  # log(1 + s): how far services move departures apart, in gaps
)
BOUND = 1.5
"""L: largest correction of log CV."""
LEAST_CV = 0.05
"""CVs below count as this in features and training: nothing is sized by less."""
SLOPE = 0.2
"""Of the leaky ReLU below 0."""
FORMAT = 1
"""Layout of the weights; another one is refused."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights did on held-out seeds and rates: mean absolute error of log CV, and from what.

    Attributes:
        chains: chains trained on.
        held_out: chains tested on.
        guess: error of "same as at the entry".
        qna: error of the formula.
        attention: error with these weights.
    """

    chains: int
    held_out: int
    guess: float
    qna: float
    attention: float


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Everything inference needs; rows are outermost.

    Attributes:
        format: `FORMAT`.
        version: name of the training: data, options, seed.
        features: `FEATURES`, in order.
        project: W [heads, features, width].
        own: a1 [heads, width].
        other: a2 [heads, width].
        theta: [heads].
        role: [3, heads]: before, self, behind.
        mix: A [heads * width + features, hidden].
        mix_bias: b [hidden].
        out: o [hidden].
        out_bias: c.
        metrics: how good they are, None before they were tested.
    """

    format: int
    version: str
    features: tuple[str, ...]
    project: list[list[list[float]]]
    own: list[list[float]]
    other: list[list[float]]
    theta: list[float]
    role: list[list[float]]
    mix: list[list[float]]
    mix_bias: list[float]
    out: list[float]
    out_bias: float
    metrics: Metrics | None = None


def features(many: Chains, flow: Flow) -> Floats:
    """Features x [p, k, f] from what is known of the chains and what `qna` makes of it."""
    log_cv = np.log(np.maximum(np.sqrt(flow.scv), LEAST_CV))
    rho = np.minimum(1.0, many.utilisation)
    return np.stack(
        (
            log_cv,
            np.broadcast_to(log_cv[:, :1], log_cv.shape),
            rho,
            np.log(1.02 - rho),
            flow.passed,
            np.log(many.servers),
            np.log(many.most),
            many.fixed_ratio,
            np.sqrt(many.service_scv),
            np.log(flow.batch),
            np.log1p(rho * many.servers * np.sqrt(many.service_scv)),
        ),
        axis=-1,
    )


class Attention:
    """Weights made ready for use.

    Args:
        weights: as trained.

    Raises:
        ValueError: the weights have another layout or other features.
    """

    def __init__(self, weights: Weights) -> None:
        if weights.format != FORMAT or weights.features != FEATURES:
            raise ValueError(
                f"weights {weights.version!r} have format {weights.format} and features "
                f"{list(weights.features)}; this release takes {FORMAT} and {list(FEATURES)}: train again"
            )
        self._project = np.array(weights.project)
        self._own, self._other = np.array(weights.own), np.array(weights.other)
        self._theta, self._role = np.array(weights.theta), np.array(weights.role)
        self._mix, self._mix_bias = np.array(weights.mix), np.array(weights.mix_bias)
        self._out, self._out_bias = np.array(weights.out), weights.out_bias

    def correction(self, x: Floats, cv: Floats) -> Floats:
        """Correction of log CV [p, k], within +-BOUND; 0 at the entry, whose CV is given.

        Args:
            x: features [p, k, f].
            cv: CV_j by `qna` [p, k].
        """
        p, k, _ = x.shape
        heads, _, width = self._project.shape
        h = np.einsum("pkf,hfd->pkhd", x, self._project)
        mine = np.einsum("pkhd,hd->pkh", h, self._own)
        theirs = np.einsum("pkhd,hd->pkh", h, self._other)
        score = np.full((3, p, k, heads), -np.inf)
        seen = np.zeros((3, p, k, heads, width))
        for role, shift in enumerate((-1, 0, 1)):
            i = slice(max(0, -shift), k - max(0, shift))
            j = slice(max(0, shift), k - max(0, -shift))
            raw = mine[:, i] + theirs[:, j]
            leaky = np.where(raw > 0, raw, SLOPE * raw)
            score[role, :, i] = leaky + self._theta * cv[:, j, None] + self._role[role]
            seen[role, :, i] = h[:, j]
        alpha = np.exp(score - score.max(axis=0))
        alpha /= alpha.sum(axis=0)
        gathered = np.einsum("rpkh,rpkhd->pkhd", alpha, seen).reshape(p, k, heads * width)
        hidden = np.tanh(np.concatenate((gathered, x), axis=-1) @ self._mix + self._mix_bias)
        delta: Floats = BOUND * np.tanh((hidden @ self._out + self._out_bias) / BOUND)
        delta[:, 0] = 0.0
        return delta

    def scv(self, entry_scv: Floats, many: Chains) -> Floats:
        """Arrival scv [p, k] of many chains from the scv [p] at their entries."""
        flow = qna.flow(entry_scv, many)
        delta = self.correction(features(many, flow), np.sqrt(flow.scv))
        return flow.scv * np.exp(2 * delta)


@functools.cache
def shipped() -> Attention:
    """The predictor with the weights this release was shipped with."""
    return Attention(msgspec.json.decode(SHIPPED, type=Weights))


def propagate(entry_scv: float, stations: Sequence[Station]) -> list[float]:
    """`qna.propagate`, corrected: arrival scv of every stage of one chain."""
    if not stations:
        return []
    found = shipped().scv(np.array([entry_scv]), qna.chains([stations]))[0]
    return [float(value) for value in found]
