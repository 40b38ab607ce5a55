"""Sends each prompt to two vLLM servers at once: one only computes it, the other one answers. README.md says how."""

import argparse
import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping

import aiohttp
from aiohttp import web

LIMITS = {"requests-max": 256, "body-mib-max": 16, "connect-s": 5, "body-s": 60, "answer-s": 1800, "alone-s": 10}
HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
NOT_PASSED_ON = {*HOP, "upgrade", "host", "expect", "content-length", "content-encoding", "accept-encoding"}
REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))  # KV is named by tokens


def sides(data: bytes, awaits: bool) -> tuple[bytes, bytes]:
    """Bodies for prefill and for decode. What is no request stays as it came: the servers say what is wrong."""
    try:
        body = json.loads(data)
        params = {**(body.get("kv_transfer_params") or {}), **REMOTE}
    except (ValueError, RecursionError, AttributeError, TypeError):
        return data, data
    one = {"max_tokens": 1} | {name: 1 for name in ("max_completion_tokens", "min_tokens", "n") if name in body}
    there = {**params, "do_remote_decode": True, "do_remote_prefill": False}
    here = {**params, "do_remote_decode": False, "do_remote_prefill": awaits}
    prefill = {**body, **one, "stream": False, "stream_options": None, "kv_transfer_params": there}
    return json.dumps(prefill).encode(), json.dumps({**body, "kv_transfer_params": here}).encode()


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower() not in NOT_PASSED_ON}


class Proxy:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.places, self.alone_until_s = options, asyncio.Semaphore(options.requests_max), 0.0
        self.timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_s)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A page comes from decode. A prompt goes to both; when its answer or its client ends, so does prefill."""
        headers = {"x-request-id": uuid.uuid4().hex, **passed_on(request.headers), "accept-encoding": "identity"}
        if request.method == "GET":
            return await self.decode(request, None, headers)
        if self.places.locked():
            raise web.HTTPServiceUnavailable(text=f"requests_max={self.options.requests_max} are under way")
        async with self.places:
            async with asyncio.timeout(self.options.body_s):  # aiohttp makes 504 of it
                there, here = sides(await request.read(), time.monotonic() >= self.alone_until_s)
            prefill = asyncio.create_task(self.prefill(request.path_qs, there, headers))
            try:
                return await self.decode(request, here, headers)
            finally:
                prefill.cancel()

    async def prefill(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        """Has the prompt computed and stored. If that fails, the decode side computes it itself."""
        call = aiohttp.request("POST", self.options.prefill + path, data=data, headers=headers, timeout=self.timeout)
        try:
            async with call as theirs:
                async for _ in theirs.content.iter_any():
                    pass
                if theirs.status >= 500:  # what is wrong with a request the decode side says
                    theirs.raise_for_status()
        except (aiohttp.ClientError, OSError) as error:
            if time.monotonic() >= self.alone_until_s:
                self.alone_until_s = time.monotonic() + self.options.alone_s
                logging.warning("prefill side failed, for a while decode is not told to wait for it: %s", error)

    async def decode(self, request: web.Request, data: bytes | None, headers: dict[str, str]) -> web.StreamResponse:
        """Passes the answer on as it comes."""
        url, ours = self.options.decode + request.path_qs, web.StreamResponse()
        call = aiohttp.request(request.method, url, data=data, headers=headers, timeout=self.timeout)
        try:
            async with asyncio.timeout(self.options.answer_s), call as theirs:
                ours = web.StreamResponse(status=theirs.status, headers=passed_on(theirs.headers))
                await ours.prepare(request)
                async for part in theirs.content.iter_any():
                    await ours.write(part)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            if not ours.prepared:
                failed = web.HTTPGatewayTimeout if isinstance(error, TimeoutError) else web.HTTPBadGateway
                raise failed(text=f"the decode side did not answer: {type(error).__name__}: {error}") from None
            if request.transport is not None:
                request.transport.abort()  # so that the client sees that the answer is not whole
        return ours


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"prefill": None, "decode": None, "host": "127.0.0.1", "port": 8000, **LIMITS}.items():
        parser.add_argument(f"--{name}", default=default, required=default is None, type=type(default or ""))
    proxy = Proxy(options := parser.parse_args())
    app = web.Application(client_max_size=options.body_mib_max << 20)
    app.add_routes([web.post(path, proxy.answer) for path in ("/v1/completions", "/v1/chat/completions")])
    app.add_routes([web.get(path, proxy.answer, allow_head=False) for path in ("/health", "/v1/models")])
    web.run_app(app, host=options.host, port=options.port, access_log=None, handler_cancellation=True)
