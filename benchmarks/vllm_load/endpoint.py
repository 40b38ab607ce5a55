"""An OpenAI endpoint over HTTP: streamed completions, with limits on output and duration."""

import json
import os
import time
from enum import StrEnum
from typing import Any, NamedTuple

import httpx

from benchmarks.vllm_load.counters import Counters, has_prefix_caching, parse
from benchmarks.vllm_load.reply import Reading, Reply

CONNECT_S = 10.0
CONTROL_S = 60.0
IDLE_S = 2.0
"""Maximum idle time of a reused connection. Servers close theirs after 5 s (uvicorn), which would lose a request."""
OPTIONAL: dict[str, Any] = {
    "ignore_eos": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
"""Fields that not every server knows: kept if a request with them is accepted."""
TEXT = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea kid body back face
"""
WORDS = TEXT.split()
"""Words for endpoints that take text only: one token each in most vocabularies."""


class Form(StrEnum):
    """The form in which prompts are sent."""

    IDS = "ids"
    """Token ids to /v1/completions: prompts have exactly the drawn tokens."""
    WORDS = "words"
    """Words to /v1/completions: about as many tokens."""
    CHAT = "chat"
    """Words as one message to /v1/chat/completions."""


class Request(NamedTuple):
    """A request as it goes over the wire."""

    path: str
    content: bytes


class Endpoint:
    """One endpoint. `url` ends before /v1. Used within one event loop; ask() may run many times at once."""

    def __init__(self, url: str, *, form: Form, model: str = "", request_s_max: float = 600.0) -> None:
        key = os.environ.get("OPENAI_API_KEY", "")
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(request_s_max, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S),
            trust_env=False,
        )
        self._form = form
        self._model = model
        self._optional: dict[str, Any] = {}

    async def close(self) -> None:
        await self._http.aclose()

    async def begin(self) -> None:
        """Finds out the model's name, and which optional fields the server knows."""
        if not self._model:
            answer = await self._http.get("/v1/models", timeout=CONTROL_S)
            answer.raise_for_status()
            self._model = answer.json()["data"][0]["id"]
        prompt = list(range(5, 12))
        plain = await self.ask(prompt, 1)
        if plain.problem.startswith("HTTP"):
            raise RuntimeError(f"the endpoint refuses a plain request: {plain.problem}")
        for name, value in OPTIONAL.items():
            kept = dict(self._optional)
            self._optional[name] = value
            if (await self.ask(prompt, 1)).problem.startswith("HTTP 4"):
                self._optional = kept

    @property
    def known(self) -> list[str]:
        """Optional fields that are sent."""
        return sorted(self._optional)

    async def ask(self, prompt: list[int], output_tokens: int) -> Reply:
        """Sends one request. Never raises: problems are in the reply."""
        return await self.send(self.request(prompt, output_tokens))

    def request(self, prompt: list[int], output_tokens: int, **fields: Any) -> Request:
        """Makes a request, so that no clock measures how long it takes. fields: further ones of its body."""
        path, body = self._body(prompt, output_tokens)
        return Request(path, json.dumps(body | fields).encode())

    async def send(self, request: Request, reading: Reading | None = None) -> Reply:
        """Sends a request. Never raises. reading: for callers that look at the answer while it arrives."""
        reading = reading or Reading()
        began_s = time.perf_counter()
        try:
            async with self._http.stream(
                "POST", request.path, content=request.content, headers={"Content-Type": "application/json"}
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")[:500]
                    return Reply(problem=f"HTTP {answer.status_code}: {text}", total_s=time.perf_counter() - began_s)
                async for line in answer.aiter_lines():
                    reading.line(line, time.perf_counter() - began_s)
        except (httpx.HTTPError, ValueError) as error:  # ValueError: a line that is no JSON
            return Reply(problem=f"{type(error).__name__}: {error}", total_s=time.perf_counter() - began_s)
        return reading.reply(time.perf_counter() - began_s)

    async def counters(self) -> Counters:
        """The engine's counters; empty if there is no /metrics."""
        return parse(await self._metrics())

    async def has_prefix_caching(self) -> bool | None:
        """None if the engine does not tell."""
        return has_prefix_caching(await self._metrics())

    async def _metrics(self) -> str:
        try:
            answer = await self._http.get("/metrics", timeout=CONTROL_S)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == httpx.codes.OK else ""

    def _body(self, prompt: list[int], output_tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"model": self._model, "stream": True, "temperature": 0, **self._optional}
        if self._form is Form.IDS:
            return "/v1/completions", {**body, "prompt": prompt, "max_tokens": output_tokens}
        words = " ".join(WORDS[token % len(WORDS)] for token in prompt)
        if self._form is Form.WORDS:
            return "/v1/completions", {**body, "prompt": words, "max_tokens": output_tokens}
        message = {"role": "user", "content": words}
        return "/v1/chat/completions", {**body, "messages": [message], "max_completion_tokens": output_tokens}
