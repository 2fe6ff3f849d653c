"""Generated requests against both OpenAPI documents, on a real gateway and a real router.

schemathesis makes requests from a document, valid and invalid ones, with a fixed seed and a bound,
and checks each answer: no server error but those that are documented, no status, content type or
body that is not, what violates a schema is refused, what fits it is accepted.

What is off, and why:
- `positive_data_acceptance` for the router: prompt and `max_tokens` together must fit the context,
  and only its tokenizer knows how many tokens a text has.
- Both data checks, `unsupported_method` and `allow_header_conformance` for `/function/...`: every
  method is passed on, and the function decides what it takes.
- 503 is an answer, not an error: no replica in time. So are 502 and 504 from functions, and 504 from
  the router, whose deadline is one of the generated headers.
`support/openapi_hooks.py` says what generated requests may not do to this machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.conformance import GATEWAY, conform
from support.local_function import authorization, function

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

pytestmark = pytest.mark.slow

DEVICE = "emulated:alpha=0.0001,beta=0.0001"
ROUTER = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503", "504"]
positive_data_acceptance.enabled = false
"""


@pytest.mark.timeout(300)  # two runs, and the world around them
def test_gateway_and_router_answer_as_their_documents_say(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    pipeline = msgspec.structs.replace(
        emulated("tiny", 2, execution="looping", context_length=64),
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )
    write(bundle, pipeline)

    async def work() -> None:
        async with LocalWorld(
            tmp_path / "state", gateway_port=0, controller=False, env={"KEYSTAGE_WAKE_S": "0.1"}
        ) as world:
            await world.deploy(function(), *deployments_for(bundle, pipeline, device=DEVICE))
            for name in ("echo", "tiny-stage-0", "tiny-stage-1"):
                await world.wait_ready(name)
            router = f"http://{(await world.wait_ready('tiny'))[0].address}"
            url = world.gateway_url
            async with aiohttp.ClientSession(headers=authorization(*world.credentials)) as session:
                async with session.get(f"{router}/openapi.json") as answer:
                    direct = await answer.read()
                async with session.get(f"{url}/function/tiny/openapi.json") as answer:
                    assert (answer.status, await answer.read()) == (200, direct)
                user, password = world.credentials
                secrets = {"KEYSTAGE_TEST_USER": user, "KEYSTAGE_TEST_PASSWORD": password}
                said = await conform(tmp_path, "router", ROUTER, f"{router}/openapi.json")
                said += await conform(tmp_path, "gateway", GATEWAY, f"{url}/openapi.json", **secrets)
                assert said.count("Tested: ") == 2
                # Everything still works, and nothing but the three names was deployed.
                async with session.post(f"{url}/function/tiny/", data=b'{"prompt":"a"}') as answer:
                    assert answer.status == 200
                async with session.get(f"{url}/system/functions") as answer:
                    names = {row["name"] for row in await answer.json()}
                kept = {"echo", "tiny", "tiny-stage-0", "tiny-stage-1"}
                assert kept <= names <= kept | {"fuzz-a", "fuzz-b", "fuzz-c"}
            log = (world.home.logs / "_gateway.log").read_text()
            assert "Traceback" not in log

    asyncio.run(work())
