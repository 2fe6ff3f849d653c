"""A user's way in: through the gateway, with curl's body and with the `openai` client, on the real model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import openai
from support.pipeline_world import served


def _chat(base_url: str) -> tuple[list[str], float, float]:
    """Texts of the chunks, seconds to the first one, seconds in all."""
    began_s = time.monotonic()
    texts: list[str] = []
    first_s = 0.0
    with openai.OpenAI(base_url=base_url, api_key="unused") as client:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Name three colours of the rainbow."}],
            max_tokens=48,
            temperature=0,
            stream=True,
        )
        for chunk in answer:
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first_s = first_s or time.monotonic() - began_s
                texts.append(text)
    return texts, first_s, time.monotonic() - began_s


def test_paris_and_a_streamed_chat_through_the_gateway(smollm2_bundle: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with served(smollm2_bundle, tmp_path) as pipeline:
            url = f"{pipeline.world.gateway_url}/function/smollm2"
            body = b'{"prompt":"The capital of France is","max_tokens":5}'
            async with pipeline.session.post(url, data=body) as answer:
                assert answer.status == 200
                assert "Paris" in (await answer.json())["text"]
            texts, first_s, all_s = await asyncio.to_thread(_chat, f"{url}/v1")
            assert len(texts) >= 8
            assert first_s < all_s / 2

    asyncio.run(run())
