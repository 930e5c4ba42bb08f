"""Serve a model over HTTP, in the completions API that OpenAI's clients speak.

    pip install '.[examples]'
    python examples/train_gpt.py      # writes train_gpt.msgpack
    python examples/serve.py
    curl localhost:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 100}'

Many clients at once are one batch: each step computes the next token of all requests, and parts of
new prompts beside them, by one `jax_flash.ragged_paged_attention` in every layer. Requests that
begin alike have pages in common. docs/serving.md tells more; serving/ has the model, the pages, the
engine and text, this file HTTP.

    python examples/serve.py --model folder    # config.json, *.safetensors and tokenizer.json
    python examples/serve.py --keep 0.2        # a fifth of the cache, by weight
    python examples/serve.py --cache-dtype float8_e4m3fn
    python examples/serve.py --pages 4096 --requests 64 --tokens 2048 --dtype bfloat16  # a GPU
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from serving.engine import Engine, Event, OverloadedError, Request
from serving.model import CACHE_SCALES, load_gpt, load_llama
from serving.text import Bytes, Text, Words, Writer

# What a request may have besides: values that ask for nothing, or that change no token.
IGNORED = {
    **dict.fromkeys(("best_of", "n", "top_p"), (None, 1)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (None, 0)),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "suffix": (None, ""),
}
KNOWN = (
    *("model", "prompt", "max_tokens", "temperature", "seed", "stop", "stream", "stream_options"),
    *("return_token_ids", "user"),
)

Part = tuple[str, list[int], str | None]  # text, its tokens, and at last why it ends


class BadRequestError(Exception):
    """What a client asked for that cannot be had, and by which argument."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


class Asked:
    """The arguments of a request for a completion, checked."""

    def __init__(self, body: Any, name: str, text: Text, engine: Engine):
        if not isinstance(body, dict):
            raise BadRequestError("the body is no JSON object")
        for param, x in body.items():
            if param not in KNOWN and x not in IGNORED.get(param, ()):
                allowed = " or ".join(json.dumps(y) for y in IGNORED.get(param, ()))
                expected = f"expected {allowed}" if allowed else "it is not known here"
                raise BadRequestError(f"{param} is {json.dumps(x)}; {expected}", param)

        def take(param: str, default: Any, fits: Callable[[Any], bool], expected: str) -> Any:
            x = body.get(param)
            if x is None:
                return default
            if not fits(x):
                raise BadRequestError(f"{param} is {json.dumps(x)}; expected {expected}", param)
            return x

        if (model := body.get("model")) not in (None, name):
            raise BadRequestError(f"model {model!r} is not here; {name!r} is", "model", 404)
        most, vocabulary = engine.most_positions, engine.model.vocabulary
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            if any("\ud800" <= x <= "\udfff" for x in prompt):
                raise BadRequestError("prompt has half of a surrogate pair", "prompt")
            prompt = text.encode(prompt)
        elif not isinstance(prompt, list) or not all(is_int(x, 0, vocabulary) for x in prompt):
            raise BadRequestError(
                f"prompt: expected one string, or a list of tokens from 0 to {vocabulary - 1}",
                "prompt",
            )
        room = most - len(prompt)
        if not prompt or room < 1:
            raise BadRequestError(
                f"prompt has {len(prompt)} tokens; expected 1 to {most - 1}", "prompt"
            )
        self.prompt: list[int] = prompt
        self.most: int = take(
            "max_tokens",
            min(16, room),
            lambda x: is_int(x, 1, room + 1),
            f"1 to {room}: the prompt has {len(prompt)} tokens, and a text may have {most}",
        )
        number = (int, float)
        self.temperature = take(
            *("temperature", 1.0, lambda x: type(x) in number and 0 <= x <= 2, "0 to 2")
        )
        seed = secrets.randbits(31)
        self.seed = take("seed", seed, lambda x: is_int(x, 0, 2**31), "0 to 2**31 - 1")
        stops = take("stop", [], is_stop, "a string, or a list of up to 4, none of them empty")
        self.stops = [stops] if isinstance(stops, str) else stops
        self.stream = take("stream", False, is_bool, "true or false")
        self.with_ids = take("return_token_ids", False, is_bool, "true or false")
        options = take("stream_options", {}, is_options, '{"include_usage": true}')
        self.with_usage = options.get("include_usage", False)


def is_int(x: Any, first: int, stop: int) -> bool:
    return type(x) is int and first <= x < stop


def is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def is_options(x: Any) -> bool:
    return isinstance(x, dict) and is_bool(x.get("include_usage", False))


def is_stop(x: Any) -> bool:
    stops = [x] if isinstance(x, str) else x
    return (
        isinstance(stops, list) and len(stops) <= 4 and all(isinstance(y, str) and y for y in stops)
    )


class Server:
    """The routes, beside an engine in a thread of its own."""

    def __init__(self, engine: Engine, text: Text, name: str):
        self.engine, self.text, self.name = engine, text, name
        self.created = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(middlewares=[name_faults], client_max_size=16 * 2**20)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.cleanup_ctx.append(self._engine)
        return app

    async def _engine(self, app: web.Application) -> AsyncIterator[None]:
        thread = threading.Thread(target=self.engine.run, name="engine", daemon=True)
        thread.start()
        yield
        self.engine.stop()
        await asyncio.to_thread(thread.join)

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "you"}
        return web.json_response({"object": "list", "data": [model]})

    async def completions(self, http: web.Request) -> web.StreamResponse:
        try:
            body = await http.json()
        except (ValueError, LookupError, RecursionError) as error:  # no such charset, too deep
            raise BadRequestError(f"the body is no JSON: {error}") from error
        except (HttpProcessingError, web.RequestPayloadError) as error:  # compressed, and it is not
            raise BadRequestError(f"the body cannot be read: {error}") from error
        asked = Asked(body, self.name, self.text, self.engine)
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        async with contextlib.aclosing(self._generate(asked)) as parts:
            if asked.stream:
                return await self._stream(http, asked, head, parts)
            text, ids, ended = "", [], None
            async for more, new, reason in parts:
                text, ids, ended = text + more, ids + new, reason
        choice = self._choice(asked, text, ids, ended)
        return web.json_response(head | {"choices": [choice], "usage": usage(asked, len(ids))})

    async def _stream(
        self, http: web.Request, asked: Asked, head: dict[str, Any], parts: AsyncIterator[Part]
    ) -> web.StreamResponse:
        part: Part | None = await anext(parts)  # a fault before it has a status of its own
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)

        async def send(event: str) -> None:
            await response.write(f"data: {event}\n\n".encode())

        count, before = 0, {"usage": None} if asked.with_usage else {}  # the last event has it
        with contextlib.suppress(ConnectionResetError):  # the client may go away
            await response.prepare(http)
            while part is not None:
                count += len(part[1])
                choices = {"choices": [self._choice(asked, *part)]}
                await send(json.dumps(head | choices | before))
                try:
                    part = await anext(parts, None)
                except Exception as fault:  # the status has been sent: an event tells it
                    http.app.logger.exception("a stream failed")
                    await send(json.dumps(fault_of(str(fault), "server_error", None)))
                    return response
            if asked.with_usage:
                await send(json.dumps(head | {"choices": [], "usage": usage(asked, count)}))
            await send("[DONE]")
        return response

    async def _generate(self, asked: Asked) -> AsyncGenerator[Part]:
        """Yields text, tokens, and at last why it ends; who stops listening ends the request."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue()

        def send(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        request = Request(asked.prompt, asked.most, send, asked.temperature, asked.seed)
        writer = Writer(self.text.decoder(), asked.stops)
        self.engine.submit(request)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, str):
                    yield writer.finish(), [], event
                    return
                token, _ = event
                if token in self.engine.model.ends:
                    continue  # "stop" follows
                piece = writer.add(token)
                if writer.stopped:
                    yield piece, [token], "stop"
                    return
                yield piece, [token], None
        finally:
            self.engine.cancel(request)

    def _choice(self, asked: Asked, text: str, ids: list[int], ended: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": ended}
        return choice | ({"token_ids": ids} if asked.with_ids else {})


def usage(asked: Asked, count: int) -> dict[str, int]:
    prompt = len(asked.prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
    }


def fault_of(message: str, kind: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


@web.middleware
async def name_faults(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answers a fault in the form that clients know."""
    headers = {}
    try:
        return await handler(request)
    except BadRequestError as fault:
        status, kind, param, message = (
            fault.status,
            "invalid_request_error",
            fault.param,
            str(fault),
        )
    except OverloadedError as fault:
        status, kind, param, message = 429, "rate_limit_error", None, str(fault)
        headers["Retry-After"] = "1"
    except web.HTTPException as fault:
        status, kind, param, message = fault.status, "invalid_request_error", None, fault.reason
        headers = {name: fault.headers[name] for name in ("Allow",) if name in fault.headers}
    except Exception as fault:
        request.app.logger.exception("a request failed")
        status, kind, param, message = 500, "server_error", None, str(fault)
    answer = web.json_response(fault_of(message, kind, param), status=status, headers=headers)
    answer.force_close()  # what is left of the body may not be readable
    return answer


def load(path: Path, dtype: str, **settings: Any) -> Server:
    """Makes a server of a checkpoint: a file of train_gpt.py, or a folder in Llama's format."""
    if path.is_dir():
        return Server(
            Engine(load_llama(path, dtype), **settings), Words(path / "tokenizer.json"), path.name
        )
    return Server(Engine(load_gpt(path, dtype), **settings), Bytes(), path.stem)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default="train_gpt.msgpack")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--cache-dtype", choices=[*CACHE_SCALES], help="instead of --dtype's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--pages", type=int, default=512, help="of the cache")
    parser.add_argument("--page-size", type=int, default=16, help="positions in each")
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--tokens", type=int, default=256, help="of a step at most")
    parser.add_argument("--waiting", type=int, default=256, help="requests that may wait")
    parser.add_argument("--keep", type=float, default=1.0, help="share of the positions that stay")
    args = vars(parser.parse_args())
    path, host, port = args.pop("model"), args.pop("host"), args.pop("port")
    if not path.exists():
        raise SystemExit(
            f"{path} is missing: python examples/train_gpt.py writes train_gpt.msgpack"
        )
    server = load(path, args.pop("dtype"), **args)
    web.run_app(server.app(), host=host, port=port, handler_cancellation=True)


if __name__ == "__main__":
    main()
