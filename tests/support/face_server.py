"""The HTTP face over an engine without workers, served by uvicorn on port 0 in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from keystage.bundle.api import Pipeline
from keystage.router.api_keys import ApiKeys
from keystage.router.engine import Engine
from keystage.router.face import Face
from keystage.router.idempotency_runs import KeyedRequests
from keystage.router.text import ByteText, TextCodec


@contextlib.contextmanager
def served(
    engine: Engine,
    pipeline: Pipeline,
    text: TextCodec | None = None,
    well: Callable[[], bool] = lambda: True,
    keyed: KeyedRequests | None = None,
    keys: ApiKeys | None = None,
) -> Iterator[int]:
    """Serves a face and gives its port.

    Args:
        engine: what generates.
        pipeline: what it says it serves.
        text: its tokenizer; bytes are ids without one.
        well: answer to both `/_/ready` and `/_/health`.
        keyed: requests with a key, None: within the default bounds.
        keys: API keys, None: nobody needs one.
    """
    face = Face(
        engine,
        pipeline,
        text or ByteText(),
        lambda: b'{"pipeline":"tiny"}',
        well,
        well,
        keyed=keyed,
        keys=keys,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(face, http="httptools", lifespan="off", log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def byte_level_tokenizer(corpus: list[str], special: list[str]) -> Tokenizer:
    """A small byte-level BPE tokenizer, trained on the spot (milliseconds)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
