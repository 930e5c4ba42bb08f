"""The server of the examples: real clients, what it computes, and what it does with its pages."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import jax
import numpy as np
import openai
import pytest
from aiohttp import web
from flax import nnx

import jax_flash

from . import small_llama
from .served_texts import continued, finish, prompts_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {"pages": 64, "page_size": 8, "requests": 8, "tokens": 32}
NAME = "tiny"


@pytest.fixture(scope="module", autouse=True)
def examples():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def gpt(tmp_path_factory) -> Any:
    """A model of train_gpt.py, and the file that it is saved in."""
    import training

    config = training.Config(layers=1, width=32, heads=4, kv_heads=2, length=96)
    model = training.GPT(config, jax_flash.flash_attention, nnx.Rngs(3))
    path = tmp_path_factory.mktemp("model") / f"{NAME}.msgpack"
    training.save(path, model)
    return model, path


@pytest.fixture(scope="module")
def served(gpt):
    """A server in a thread of this process, its address, and its engine."""
    import serve

    options = {"--model": gpt[1], "--waiting": 500, "--pages": 64, "--page-size": 8}
    options |= {"--requests": 8, "--tokens": 32}
    servers, runs = [], []
    with pytest.MonkeyPatch.context() as patch:
        load = serve.load
        patch.setattr(
            serve, "load", lambda *args, **x: servers.append(load(*args, **x)) or servers[0]
        )
        patch.setattr(web, "run_app", lambda app, **x: runs.append((app, x)))
        patch.setattr(sys, "argv", ["serve.py", *(f"{x}={y}" for x, y in options.items())])
        serve.main()
    ((app, given),) = runs
    assert (given.pop("host"), given.pop("port")) == ("127.0.0.1", 8000)
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []

    async def run():
        runner = web.AppRunner(app, **given)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append("http://{}:{}".format(*runner.addresses[0]))
        stop = asyncio.Event()
        address.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(60)
    yield servers[0], address[0]
    address[1]()
    thread.join()
    loop.close()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_200_requests_at_once(served, gpt, capsys):
    """None is lost, all tokens are those of a request alone; dropped connections leave nothing."""
    server, address = served
    prompts, rng = prompts_of(0, 200, 70), np.random.default_rng(1)
    most = rng.integers(1, 25, 200).tolist()
    latencies = []

    async def ask(session, i):
        body = {"prompt": prompts[i], "max_tokens": most[i], "temperature": 0}
        body |= {"return_token_ids": True, "stream": i % 3 == 0}
        begin = time.perf_counter()
        async with session.post(f"{address}/v1/completions", json=body) as response:
            assert response.status == 200
            if not body["stream"]:
                choices = (await response.json())["choices"]
            else:
                lines = [x.decode().strip() async for x in response.content]
                events = [x.removeprefix("data: ") for x in lines if x]
                assert events.pop() == "[DONE]"
                choices = [json.loads(x)["choices"][0] for x in events]
        latencies.append(time.perf_counter() - begin)
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert choices[-1]["finish_reason"] == ("length" if len(ids) == most[i] else "stop")
        return ids

    async def drop(session, i):
        body = {"prompt": prompts[i], "max_tokens": 20, "stream": i % 2 == 0, "temperature": 0}
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(0.02):
                async with session.post(f"{address}/v1/completions", json=body) as response:
                    await response.content.readline()

    async def ask_all():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            dropped = asyncio.gather(*(drop(session, i) for i in range(20)))
            answers = await asyncio.gather(*(ask(session, i) for i in range(200)))
            await dropped
            return answers

    begin = time.perf_counter()
    answers = asyncio.run(ask_all())
    seconds = time.perf_counter() - begin
    assert answers == continued(gpt[0], prompts, answers)
    wait_for(lambda: server.engine.pages.available == SETTINGS["pages"])
    assert not server.engine.running
    assert not server.engine.waiting
    with capsys.disabled():
        half, most_of = np.percentile(latencies, [50, 99])
        print(
            f"\n200 requests: {sum(map(len, answers)) / seconds:,.0f} tokens/s; latency "
            f"{half:.2f} s in the median, {most_of:.2f} s at the 99th percentile"
        )


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_openais_client(served, client):
    (model,) = client.models.list().data
    assert model.id == NAME
    ask: dict[str, Any] = {"model": NAME, "prompt": "import os", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**ask)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 30)
    parts = list(
        client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert [x.to_dict()["usage"] for x in parts] == [None] * 31 + [whole.usage.to_dict()]
    choices = [part.choices[0] for part in parts[:-1]]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices] == [None] * 30 + ["length"]
    # A stop string, from the middle of a character's tokens on or not, is not in the text.
    text = whole.choices[0].text
    stopped = client.completions.create(**ask, stop=["never", text[5:8]])
    assert stopped.choices[0].text == text[: text.index(text[5:8])]
    assert stopped.choices[0].finish_reason == "stop"
    drawn = [
        client.completions.create(**ask | {"temperature": 1.5, "seed": seed}).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_bad_requests_are_named(served, client):
    for error, words, changes in (
        (openai.BadRequestError, "max_tokens is 95; expected 1 to 94", {"max_tokens": 95}),
        (openai.BadRequestError, "prompt has 100 tokens; expected 1 to 95", {"prompt": "a" * 99}),
        (openai.BadRequestError, "tokens from 0 to 255", {"prompt": [1, 256]}),
        (openai.BadRequestError, "one string", {"prompt": ["a", "b"]}),
        (openai.BadRequestError, "temperature is -1; expected 0 to 2", {"temperature": -1}),
        (openai.BadRequestError, "n is 2; expected null or 1", {"n": 2}),
        (openai.BadRequestError, "stop", {"stop": [""]}),
        (openai.BadRequestError, "seed", {"seed": 2**31}),
        (openai.BadRequestError, "stream_options", {"stream_options": {"include_usage": "no"}}),
        (openai.BadRequestError, "top_k is 3; it is not known", {"extra_body": {"top_k": 3}}),
        (openai.NotFoundError, "model 'other' is not here; 'tiny' is", {"model": "other"}),
    ):
        with pytest.raises(error, match=words) as caught:
            client.completions.create(**{"model": NAME, "prompt": "a"} | changes)
        assert caught.value.type == "invalid_request_error"
    deep = b"[" * 100_000 + b"]" * 100_000
    half, kind = b'{"prompt": "a\\ud800"}', "Content-Type"
    for data, headers in (
        *((data, {}) for data in (b"{", b"3", deep, half, b"")),
        (b'{"prompt": "a"}', {kind: "application/json; charset=none"}),
        (b'{"prompt": "a"}', {"Content-Encoding": "gzip"}),
    ):
        headers = {kind: "application/json"} | headers
        for path, status in (("completions", 400), ("x", 404), ("models", 405)):
            allow = "GET,HEAD" if path == "models" else None
            response = client._client.post(f"{served[1]}/v1/{path}", content=data, headers=headers)
            assert (response.status_code, response.headers.get("Allow")) == (status, allow)
            assert response.json()["error"]["message"]


def test_overload_and_a_dropped_connection(served, client, monkeypatch):
    engine, ask = served[0].engine, {"model": NAME, "prompt": "abc", "max_tokens": 80}
    step, requests = type(engine).step, []

    def slowly(self):
        requests.extend(x for x in self.waiting if x not in requests)
        time.sleep(0.02)
        step(self)

    monkeypatch.setattr(type(engine), "step", slowly)
    with client.completions.create(**ask, temperature=0, stream=True) as stream:
        next(iter(stream))
        assert engine.pages.available < SETTINGS["pages"]
    wait_for(lambda: engine.pages.available == SETTINGS["pages"])
    assert len(requests[0].tokens) < 80  # of 84: it did not run to its end
    monkeypatch.setattr(engine, "most_waiting", 0)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="0 requests wait") as caught:
            client.completions.create(**ask, stream=stream)
        assert caught.value.response.headers["Retry-After"] == "1"


def test_few_pages_and_pages_in_common(served, gpt):
    """Requests give way and are computed again; what begins alike is computed once."""
    from serving.engine import Engine

    engine = Engine(served[0].engine.model, **SETTINGS)
    prompts = prompts_of(5, 12, 70)
    lost = [engine.pages.take() for _ in range(SETTINGS["pages"] - 20)]
    remove, removed = engine._remove, []

    def counted(request):
        removed.append(request)
        remove(request)

    engine._remove = counted
    got, _ = finish(engine, [(prompt, 20) for prompt in prompts])
    assert len(removed) > len(prompts)  # some before their ends
    assert got == continued(gpt[0], prompts, got)
    engine.pages.release(lost)

    prompt = np.random.default_rng(9).integers(1, 256, 60).tolist()
    whole, counts = finish(engine, [(prompt, 8)])
    assert counts == [32, 28] + [1] * 7  # in two parts, then token by token
    again, counts = finish(engine, [(prompt, 8)])
    assert counts == [60 - 56] + [1] * 7  # seven pages are there
    assert whole == again == continued(gpt[0], [prompt], whole)
    _, counts = finish(engine, [(prompt + whole[0] + [5], 1)])
    assert counts == [69 - 64]  # what was drawn is found too
    _, counts = finish(engine, [([*prompt[:20], 1, *prompt[21:]], 1)])
    assert sum(counts) == 60 - 16
    assert engine.pages.available == SETTINGS["pages"]


@pytest.mark.usefixtures("few_are_shared")
def test_common_instructions_are_read_once(served, gpt, monkeypatch):
    """While five of eight requests have them: not with the first alone, nor where few would."""
    from serving import engine as module

    engine = module.Engine(served[0].engine.model, **SETTINGS, shared=4 * 40)
    rng, step, seen = np.random.default_rng(6), module.run_step, []
    others, instructions = (rng.integers(1, 256, (n, 45)).tolist() for n in (3, 1))
    prompts = [instructions[0] + rng.integers(1, 256, n).tolist() for n in (3, 9, 1, 20, 6)]
    first, _ = finish(engine, [(prompts[0], 20)])

    def run_step(forward, weights, pages, batch, *rest, **options):
        shared = batch.shared_pages
        seen.append([] if shared is None else shared[shared >= 0].tolist())
        alike = [row[: len(seen[-1])].tolist() == seen[-1] for row in batch.page_table]
        assert not seen[-1] or sum(alike[: batch.rows]) >= 5
        return step(forward, weights, pages, batch, *rest, **options)

    monkeypatch.setattr(module, "run_step", run_step)
    programs = step._cache_size()
    got, _ = finish(engine, [(prompt, 20) for prompt in (*prompts, *others)])
    assert step._cache_size() == programs  # those that the engine began with
    assert got == continued(gpt[0], [*prompts, *others], got)
    assert got[0] == first[0]
    assert {len(x) for x in seen} == {0, 5}
    assert sum(map(len, seen)) >= 5 * 20
    seen.clear()
    finish(engine, [(prompt, 20) for prompt in (*prompts[:4], *others)])
    assert not any(seen)


def test_a_cache_with_a_budget(gpt, served):
    """Each request keeps its share; with all pages the loss is the model's own."""
    import serve_budget
    from serving.model import CACHE_SCALES, Batch, weigh_pages

    model, rng = served[0].engine.model, np.random.default_rng(4)
    texts = rng.integers(1, 256, (3, 96)).tolist()
    loss, share = serve_budget.measure(model, texts, 1.0, 8)
    scores = jax.nn.log_softmax(gpt[0](np.array(texts))[..., :256])
    expected = [-scores[i, t - 1, text[t]] for i, text in enumerate(texts) for t in range(48, 96)]
    np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-5)
    assert share == 1.0
    for kind in CACHE_SCALES:
        dropped, share = serve_budget.measure(model, texts, 0.3, 8, kind)
        assert 0.25 < share < 0.4
        assert 1e-5 < abs(dropped - loss) < 0.1

    # Pages of 4; requests of 2 tokens behind 9 positions, of 5, of none; then of one token each.
    keys = rng.standard_normal((6, 4, 2, 8), np.float32)
    table, lengths = np.array([[3, 0, 5], [1, 4, 0], [0, 0, 0]], np.int32), np.array([11, 5, 0])
    for starts, tokens in ((np.array([0, 2, 7, 7]), 8), (np.array([0, 1, 2, 2]), 3)):
        query = jax.numpy.asarray(rng.standard_normal((tokens, 4, 8), np.float32))
        out = jax_flash.ragged_paged_attention(query, keys, keys, lengths, table, starts)
        batch = Batch(None, None, lengths, table, starts, 2)
        got = weigh_pages(query, out.lse, jax.numpy.asarray(keys), None, batch)
        plain = np.zeros((3, 12))
        for b in range(2):
            for t in range(starts[b], starts[b + 1]):
                seen = lengths[b] - (starts[b + 1] - t) + 1
                row = keys[table[b]].reshape(12, 2, 8)[:seen]
                logits = np.einsum("nh,snh->ns", query[t], row.repeat(2, 1)) / 8**0.5
                weights = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).sum(0)
                plain[b, :seen] += 0.98 ** (starts[b + 1] - 1 - t) * weights
        np.testing.assert_allclose(got, plain.reshape(3, 3, 4).sum(-1), rtol=1e-5, atol=1e-6)


def test_a_checkpoint_in_llamas_format(tmp_path):
    import serve

    arrays = small_llama.save(tmp_path)
    server = serve.load(tmp_path, "float32", **SETTINGS)
    assert server.engine.model.ends == (7,)
    prompt = server.text.encode("Grüße")
    assert len(prompt) == 7
    decode = server.text.decoder()
    assert [decode(token) for token in prompt] == ["G", "r", "", "ü", "", "ß", "e"]
    ((ids,), _) = finish(server.engine, [(prompt, 10)])
    exact = {name: x.astype(np.float64) for name, x in arrays.items()}
    scores = small_llama.scores(exact, np.array(prompt + ids))
    assert ids == scores[len(prompt) - 1 : -1].argmax(-1).tolist()

    for change, words in (
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3'; expected 'default'"),
        (
            {"num_hidden_layers": 2},
            r"no model.layers.1.input_layernorm.weight; expected .* \(24,\)",
        ),
        ({"num_hidden_layers": 0}, "model.layers.0.* arrays in all that Llama has not"),
        ({"intermediate_size": 41}, r"\(40, 24\) for model.layers.0.mlp.gate_proj.weight"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(small_llama.CONFIG | change))
        with pytest.raises(ValueError, match=words):
            serve.load(tmp_path, "float32", **SETTINGS)


def test_a_fault_in_a_stream_is_its_last_event(served, client, monkeypatch, caplog):
    def decoder():
        texts = ["b", "a"]

        def decode(token):
            if not texts:
                raise OSError("no more text")
            return texts.pop()

        return decode

    monkeypatch.setattr(served[0].text, "decoder", decoder)
    stream = client.completions.create(
        model=NAME, prompt="a", max_tokens=9, temperature=0, stream=True
    )
    heard: list[str] = []
    with pytest.raises(openai.APIError, match="no more text"):
        heard.extend(part.choices[0].text for part in stream)
    assert heard == ["a", "b"]
    assert "a stream failed" in caplog.text


def test_the_engines_fault_reaches_its_requests(served, caplog):
    from serving.engine import Engine, Request

    engine, heard = Engine(served[0].engine.model, **SETTINGS), []
    engine.submit(Request([1], 5, heard.append))
    engine._kv = None
    engine.run()
    assert isinstance(heard[0], Exception)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.submit(Request([1], 5, heard.append))
    with pytest.raises(ValueError, match=r"requests 8, tokens 8, .* tokens > requests"):
        Engine(served[0].engine.model, **SETTINGS | {"tokens": 8})
    with pytest.raises(
        ValueError, match=r"1 tokens and 96 new ones; expected .* at most 96 together"
    ):
        engine.submit(Request([1], 96, heard.append))
