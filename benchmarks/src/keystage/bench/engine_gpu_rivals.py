"""Unsplit models on GPUs, in a process of its own: the rivals of `keystage bench engine` there.

A decoder in three ways: eager (a plain loop of forward calls, quicker than `generate`), `generate` with a
static cache, which transformers compiles, and eager over several GPUs by a device map. Encoders, networks for
images and Whisper: forward passes of one batch. Weights are random; times do not depend on them. This process
imports nothing of the engine. Without a GPU it computes on the CPU, compiles nothing, and means nothing.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

_WARM_TOKENS = 4
_TEXT_TOKENS = 128
_RATE_ROUNDS = 3
_REHEARSED_TOKENS = 8

_loaded: dict[str, Any] = {"key": None, "model": None}


def answer(order: dict[str, Any]) -> Any:
    """Carries out an order.

    Args:
        order: `do` and what that takes: `version`; `step` (config, gpus, way, batch, prompt, tokens):
            {`prefill_s`, `token_s`}; `rate` (config, batch, seconds): items a second; `free`.
    """
    match order["do"]:
        case "version":
            import transformers

            transformers.logging.set_verbosity_error()
            return str(transformers.__version__)
        case "step":
            return _step(order)
        case "rate":
            return _rate(order)
        case "free":
            _forget()
            return None
    raise ValueError(f"no order {order['do']!r}")


def _step(order: Mapping[str, Any]) -> dict[str, float]:
    import torch

    model = _decoder(order["config"], order["gpus"])
    ids = torch.randint(0, order["config"]["vocab_size"], (order["batch"], order["prompt"]), device=_device())
    with torch.inference_mode():
        run = _compiled if order["way"] == "compiled" else _eager
        times = run(model, ids, order["tokens"])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # ours lives on the same GPU
    return times


def _device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _forget() -> None:
    import torch

    _loaded.update(key=None, model=None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _made(key: object, make: Callable[[], Any], place: Callable[[Any], Any] | None = None) -> Any:
    """The model of an order, kept for the next; in bf16, on the first device or where `place` puts it."""
    import torch

    if _loaded["key"] == key:
        return _loaded["model"]
    _forget()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(_device() if place is None else "meta"):
            model = make()
    finally:
        torch.set_default_dtype(before)
    model = model.eval()
    if place is not None:
        model = place(model)
    _loaded.update(key=key, model=model)
    return model


def _decoder(config: Mapping[str, Any], gpus: int) -> Any:
    def make() -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))

    return _made((str(config), gpus), make, None if gpus == 1 else lambda m: _spread(m, config, gpus))


def _spread(model: Any, config: Mapping[str, Any], gpus: int) -> Any:
    """Over several GPUs, as `device_map` does it; each layer is made where it belongs: no GPU holds all."""
    import torch
    from accelerate import dispatch_model

    there = [index if torch.cuda.is_available() else "cpu" for index in range(gpus)]
    layers = config["num_hidden_layers"]
    is_opt = config["model_type"] == "opt"
    root, ends = ("model.decoder", ("embed_positions", "final_layer_norm")) if is_opt else (
        "model", ("rotary_emb", "norm"))  # fmt: skip
    places: dict[str, Any] = {
        f"{root}.embed_tokens": there[0], f"{root}.{ends[0]}": there[0],
        f"{root}.{ends[1]}": there[-1], "lm_head": there[-1],
    }  # fmt: skip
    places |= {f"{root}.layers.{i}": there[i * gpus // layers] for i in range(layers)}
    for name, place in places.items():
        part = model.get_submodule(name).to_empty(device=place)
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        for buffer in part.buffers():
            buffer.fill_(0.5)  # frequencies of a rotation: any will do
    return dispatch_model(model, places)


def _synchronized_s() -> float:
    import torch

    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return time.perf_counter()


def _eager(model: Any, ids: Any, tokens: int) -> dict[str, float]:
    model(ids[:, :_WARM_TOKENS], use_cache=True)
    begin_s = _synchronized_s()
    out = model(ids, use_cache=True, logits_to_keep=1)
    newest = out.logits[:, -1:].argmax(-1).to(ids.device)
    first_s = _synchronized_s()
    for _ in range(tokens):
        out = model(newest, past_key_values=out.past_key_values, use_cache=True)
        newest = out.logits[:, -1:].argmax(-1).to(ids.device)
    return {"prefill_s": first_s - begin_s, "token_s": (_synchronized_s() - first_s) / tokens}


def _compiled(model: Any, ids: Any, tokens: int) -> dict[str, float]:
    import torch

    def generate(new: int) -> float:
        begin_s = _synchronized_s()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new, max_new_tokens=new,
            cache_implementation="static", pad_token_id=0, disable_compile=not torch.cuda.is_available(),
        )  # fmt: skip
        return _synchronized_s() - begin_s

    few, many = 8, 8 + tokens
    generate(many)  # compiles
    generate(few)
    short_s, long_s = generate(few), generate(many)
    return {"prefill_s": float("nan"), "token_s": (long_s - short_s) / tokens}


def _rate(order: Mapping[str, Any]) -> float:
    """Items a second of forward passes of one batch, inputs on the device already."""
    import torch

    config, batch = order["config"], order["batch"]
    with torch.inference_mode():
        run = _forward(config, batch)
        run()
        count, begin_s = 0, _synchronized_s()
        while _synchronized_s() - begin_s < order["seconds"] or count < _RATE_ROUNDS:
            run()
            count += 1
        return float(count * batch / (_synchronized_s() - begin_s))


def _forward(config: Mapping[str, Any], batch: int) -> Callable[[], Any]:
    import torch
    import transformers

    device = _device()
    if config["model_type"] == "wide_resnet":
        models = importlib.import_module("torchvision.models")
        network = _made(
            str(config),
            lambda: models.ResNet(
                models.resnet.Bottleneck, config["layers"], config["num_classes"],
                width_per_group=config["width_per_group"],
            ),
        )  # fmt: skip
        pictures = torch.randn(batch, 3, 224, 224, device=device, dtype=torch.bfloat16)
        return lambda: network(pictures)
    known = {key: value for key, value in config.items() if key != "sentence_transformers"}
    if config["model_type"] == "whisper":
        known |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    found = transformers.AutoConfig.for_model(**known)
    if config["model_type"] == "whisper":
        whisper = _made(str(config), lambda: transformers.WhisperForConditionalGeneration(found))
        mel = torch.randn(batch, config["num_mel_bins"], 3000, device=device, dtype=torch.bfloat16)
        # As many as our router asks for; a rehearsal on a CPU would take minutes.
        tokens = config["max_target_positions"] // 2 if torch.cuda.is_available() else _REHEARSED_TOKENS
        return lambda: whisper.generate(
            mel, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0
        )
    encoder = _made(str(config), lambda: transformers.AutoModel.from_config(found))
    ids = torch.randint(0, config["vocab_size"], (batch, _TEXT_TOKENS), device=device)
    return lambda: encoder(ids).last_hidden_state.mean(1)
