"""transformers' `generate` in a process of its own: the rival of `keystage bench engine` on a CPU.

It loads the unsplit model from a folder and waits for orders, so that rounds of ours and of it may
alternate while neither computes in the other's time. It must not import anything of the engine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keystage.bench.frame import BenchError

LOAD_S = 180.0
GENERATE_S = 600.0


@dataclass(frozen=True, slots=True)
class Generated:
    """One call of `generate`.

    Attributes:
        seconds: from the call to its return.
        ids: new tokens per prompt.
    """

    seconds: float
    ids: list[list[int]]


class TransformersProcess:
    """The unsplit model, greedy, eager, with the default (SDPA) attention and a dynamic cache.

    Args:
        folder: model folder as `save_pretrained` writes it.
        dtype: torch's name of the element type.

    Attributes:
        version: of transformers.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self._arguments = (str(folder), dtype)
        self.version = ""

    def __enter__(self) -> Self:
        """Starts it and waits until the model is loaded and has generated once.

        Raises:
            BenchError: it did not come up.
        """
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.version = str(self._answer(LOAD_S))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it."""
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(5)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, threads: int) -> Generated:
        """Continues all prompts, which are equally long, as one batch; end tokens do not end it.

        Args:
            prompts: token ids.
            tokens: new tokens each.
            threads: intra-op threads.

        Raises:
            BenchError: it has ended, or takes too long.
        """
        self._connection.send(([list(prompt) for prompt in prompts], tokens, threads))
        seconds, ids = self._answer(GENERATE_S)
        return Generated(seconds, ids)

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise BenchError(f"transformers did not answer within {timeout_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise BenchError(
                f"the process of transformers has ended (exit {self._process.exitcode})"
            ) from error
        if isinstance(answer, Exception):
            raise BenchError(f"transformers: {answer}")
        return answer


def _serve(connection: Connection, folder: str, dtype: str) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        connection.send(error)
        return
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    _generate(torch, model, [[1, 2, 3]], 4)
    connection.send(transformers.__version__)
    while True:
        try:
            prompts, tokens, threads = connection.recv()
        except EOFError:
            return
        torch.set_num_threads(threads)
        connection.send(_generate(torch, model, prompts, tokens))


def _generate(torch: Any, model: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    begin_s = time.perf_counter()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True
        )
    return time.perf_counter() - begin_s, found[:, ids.shape[1] :].tolist()
