"""The web page in a real browser, headless: a conversation, the colours of its tokens, hostile text, the server view.

It needs `playwright` and Chromium, as of Debian's package `chromium`, or Chrome, or what FDSD_CHROMIUM names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.types import RequestId
from tests.doubles.proposers import OracleProposer
from tests.server.test_api import CHAT
from tests.server.test_speculation import executor
from tests.server.toy_server import TOKENIZER, Served, post, serve, server_config, toy_tokens

pytestmark = pytest.mark.slow
api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("FDSD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip(f"no browser here: none of {', '.join(NAMES)}; Debian has the first", allow_module_level=True)

TIMEOUT_MS = 60000
ATTACK = """<img src=x onerror="window.hit=1"><script>window.hit=1</script> **bold** `code` <b>b</b>
[a](javascript:window.hit=1) [b](https://good.example/?a=1&b=2) [c](data:text/html,x) [d](//evil.example) https://x.example.

| head | <i>two</i> |
|---|---|
| 1 | `2` |

- one
  - two
1. three

> quoted <svg onload="window.hit=1">

```html"onmouseover="window.hit=1
<iframe src="javascript:parent.hit=1"></iframe>
```
"""


class _Continuations(dict[RequestId, list[int]]):
    """What the toy model says after the prompt of any request of a server."""

    served: Served

    def __missing__(self, request_id: RequestId) -> list[int]:
        [prompt] = [r.prompt_token_ids.tolist() for r in self.served.client.submitted if r.request_id == request_id]
        self[request_id] = prompt + toy_tokens(prompt, 60)
        return self[request_id]


@asynccontextmanager
async def drafting_server(server: ServerConfig | None = None) -> AsyncIterator[Served]:
    """A server whose drafts are all right."""
    known = _Continuations()
    made = executor(lambda _, vocab_size: OracleProposer(known, vocab_size))
    async with serve(server_config(server), made) as served:
        known.served = served
        yield served


@asynccontextmanager
async def page_of(served: Served, stored: dict[str, Any], width: int = 1200) -> AsyncIterator[Any]:
    """A page of the server's in a browser of its own; fails on errors of scripts and on requests to others."""
    problems: list[str] = []
    own = str(served.http.base_url).rstrip("/")
    async with api.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(viewport={"width": width, "height": 800})
        context.set_default_timeout(TIMEOUT_MS)
        items = {f"fastdeploy_sd.{name}": json.dumps(value) for name, value in stored.items()}
        begin = f"Object.assign(localStorage, {json.dumps(items)}); sessionStorage.begun = 1"
        await context.add_init_script(f"if (!sessionStorage.begun) {{ {begin} }}")
        page = await context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if "Content Security" in line.text else None)
        page.on("request", lambda asked: problems.append(asked.url) if not asked.url.startswith(own) else None)
        await page.goto(own)
        yield page
        await browser.close()
    assert problems == []


async def ask(page: Any, text: str) -> str:
    """Send a message, wait for the end of the answer and return it."""
    await page.fill("#text", text)
    await page.press("#text", "Enter")
    await page.wait_for_selector(".message.assistant:last-child .numbers")
    return str(await page.inner_text(".message.assistant:last-child > .body"))


async def test_a_conversation_and_the_colours_of_its_tokens() -> None:
    settings = {"temperature": "0", "max_tokens": "25", "system": "Be short."}
    async with drafting_server() as served, page_of(served, {"settings": settings}) as page:
        await page.wait_for_selector(".state.ready")
        first = await ask(page, "one")
        sent = served.client.submitted[-1]
        body = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "one"}]}
        answer = await post(served, CHAT, body | {"temperature": 0, "max_tokens": 25, "return_token_ids": True})
        assert answer["prompt_token_ids"] == sent.prompt_token_ids.tolist()
        said = answer["choices"][0]["message"]["content"]
        assert "".join(first.split()) == "".join(said.split())
        await ask(page, "two")
        assert len(await page.query_selector_all(".message")) == 4
        await page.click(".message.user:first-child button:has-text('Edit')")
        await page.fill(".edit textarea", "three")
        await page.click("button:has-text('Send again')")
        await page.wait_for_selector(".message.assistant:last-child .numbers")
        assert await page.inner_text(".messages .message.user > .body") == "three"
        await page.click("button:has-text('Regenerate')")
        await page.wait_for_function("document.querySelectorAll('.message').length === 2")
        await page.wait_for_selector(".message.assistant:last-child .numbers")
        shown = await page.inner_text(".message.assistant .numbers summary")
        assert shown.startswith("25 tokens in "), shown
        await page.reload()
        assert await page.inner_text(".message.assistant .numbers summary") == shown, "it is kept"


async def test_files_become_part_of_the_message_and_an_answer_can_be_stopped() -> None:
    files = [("a.py", b"x = '```'\n"), ("b.bin", b"\0\1"), ("c.txt", b"\xff")]
    async with drafting_server() as served, page_of(served, {"settings": {"max_tokens": "300"}}) as page:
        await page.wait_for_selector(".state.ready")
        for name, content in files:
            async with page.expect_file_chooser() as choosing:
                await page.press("#choose", "Enter")
            await (await choosing.value).set_files({"name": name, "mimeType": "text/plain", "buffer": content})
            await page.wait_for_selector(
                "#files .chip" if name == "a.py" else f"#notice:text('{name}: expected a text')"
            )
        served.client.running.clear()
        await page.fill("#text", "look")
        await page.click("#send")
        while not served.client.submitted:
            await asyncio.sleep(0.01)
        prompt = TOKENIZER.decode(served.client.submitted[0].prompt_token_ids.tolist(), skip_hidden=False)
        assert "File a.py:\n````\nx = '```'\n\n````\n\nlook" in prompt
        await page.click("#stop")
        await page.wait_for_selector(".end:text('Stopped')")
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            while not served.client.aborted:
                await asyncio.sleep(0.01)
        assert served.client.aborted == [served.client.submitted[0].request_id]


@pytest.mark.parametrize("text", [ATTACK])
async def test_hostile_text_stays_text(text: str) -> None:
    runs = [{"source": "ngram", "num_tokens": 9, "text": text[:200]},
            {"source": "<b>x</b>", "num_tokens": 9, "text": text[200:]}]  # fmt: skip
    steps = [{"runs": runs, "drafted": {"ngram": 12}}] * 2
    call = {"id": "1", "name": "<img src=x onerror=window.hit=1>", "arguments": text}
    stored = [
        {"role": "user", "content": text, "files": [{"name": "<b>f</b>", "text": text}]},
        {"role": "assistant", "content": text, "reasoning": text, "calls": [call], "steps": steps},
    ]
    async with serve() as served, page_of(served, {"messages": stored}) as page:
        await page.wait_for_selector(".state.ready")
        body = ".message.assistant > .body"
        links = await page.eval_on_selector_all("a[href]:not(.skip)", "all => all.map((a) => [a.href, a.rel])")
        rel = "noopener noreferrer"
        assert set(map(tuple, links)) == {("https://good.example/?a=1&b=2", rel), ("https://x.example/", rel)}
        made = "img, script:not([src]), iframe, svg, b, i, [onerror], [onload], [onmouseover]"
        assert await page.eval_on_selector_all(f"#chat :is({made})", "all => all.length") == 0
        assert await page.evaluate("window.hit") is None
        names = ["strong", "p code", "table td", "ul li ul li, ul li", "blockquote", "pre code"]
        found = [await page.inner_text(f"{body} {name}") for name in names]
        assert found[:3] == ["bold", "code", "1"]
        assert '<svg onload="window.hit=1">' in found[4]
        assert found[5].strip() == '<iframe src="javascript:parent.hit=1"></iframe>'
        tokens = await page.eval_on_selector_all(f"{body} .from-ngram", "all => all.map((t) => t.textContent).join('')")
        assert tokens.startswith('<img src=x onerror="window.hit=1">')
        await page.hover(f"{body} .from-ngram")
        tip = await page.inner_text("#tip")
        assert "n-gram" in tip
        assert "18 of 12 drafts accepted" in tip


async def test_the_key_is_asked_for_once_and_the_server_view_shows_numbers_on_a_phone() -> None:
    server = drafting_server(ServerConfig(api_key=("secret",)))
    async with server as served, page_of(served, {"settings": {"max_tokens": "9"}}, width=390) as page:
        await page.wait_for_selector("#key[open]")
        for key in ("wrong", "secret"):
            await page.fill("#key-text", key)
            await page.click("#key-form button")
            await page.wait_for_function("key => localStorage['fastdeploy_sd.key'] === JSON.stringify(key)", arg=key)
            if key == "wrong":
                await page.wait_for_selector("#key-refused:not([hidden])")
        await page.wait_for_selector("#model option", state="attached")
        await ask(page, "hello")
        await page.reload()
        await page.click("#show-server")
        await page.wait_for_selector(".tile")
        assert not await page.is_visible("#key")
        tiles = await page.inner_text(".tiles")
        assert "9 since the start" in tiles
        sources = await page.inner_text("#server .panel table")
        assert "MTP" in sources
        for view in ("#show-chat", "#show-server"):
            await page.click(view)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
