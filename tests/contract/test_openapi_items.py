"""Generated requests against the OpenAPI documents of single-pass routers: embeddings, masks, images.

As `test_openapi_conformance` does with real workers; here the face stands over an engine without workers,
since what is looked at is what the face takes and answers. `positive_data_acceptance` is off: an input must
fit the context, a text must hold a mask, and bytes must be an image, which no schema says. 504 is what a
deadline of microseconds gets. `/_/stats` is off, as there is nobody to count.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from support.conformance import conform
from support.face_server import served
from support.item_engine import ItemEngine, embed, limits_for, pipeline_for

from keystage.bundle.api import Pipeline

CONFIG = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]
positive_data_acceptance.enabled = false
[[operations]]
include-path = "/_/stats"
enabled = false
"""
BERT = pipeline_for("bert", architectures=["BertModel"])
FILLER = pipeline_for("bert", architectures=["BertForMaskedLM"])
NETWORK = pipeline_for("wide_resnet", layers=[1, 1, 1, 1], num_classes=7, image_size=32)


def likeliest(payload: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Logits of an image."""
    assert len(payload) == np.prod(shape) * np.dtype(dtype).itemsize
    return np.linspace(0, 1, 7, dtype="<f4").tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [BERT, FILLER, NETWORK], ids=["embeddings", "masks", "images"])
def test_router_answers_as_its_document_says(tmp_path: Path, pipeline: Pipeline) -> None:
    engine = ItemEngine(limits_for(pipeline), likeliest if pipeline is NETWORK else embed)
    with served(engine, pipeline) as port:
        said = asyncio.run(conform(tmp_path, "router", CONFIG, f"http://127.0.0.1:{port}/openapi.json"))
    assert said.count("Tested: ") == 1
    if pipeline is BERT:
        assert engine.begun > 0
