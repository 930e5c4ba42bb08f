"""The examples run, and the GPT trains the same with either attention and on a mesh of devices."""

import collections
import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import training
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jax_flash

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--steps=4", "--layers=1", "--length=64", "--batch=8", "--width=64"]


def run(script, *arguments, devices=1):
    """Output of an example, run by itself on so many CPU devices."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(jax_flash.__file__).parents[1]),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def load_example(name) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and other examples look the module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_gpt() -> Any:
    return load_example("train_gpt")


@pytest.fixture(scope="module")
def generate(train_gpt) -> Any:
    return load_example("generate")


def test_quickstart():
    out = run("quickstart.py")
    assert float(re.findall(r"error (\S+)", out)[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)  # two programs that each compile a training step: 25 s on two idle cores
def test_gpt_trains_the_same_by_flash_on_a_mesh_and_by_xla(tmp_path):
    text = ["--text", str(Path(jax_flash.__file__).parent)]
    losses = []
    for devices, arguments in [(8, ["--mesh=data=2,model=2,seq=2"]), (1, ["--attention=xla"])]:
        picture = tmp_path / f"{devices}.png"
        files = [f"--plot={picture}", f"--checkpoint={tmp_path / 'model'}"]
        out = run("train_gpt.py", *SMALL, *text, *arguments, *files, devices=devices)
        losses.append(float(re.findall(r"^loss +(\S+)", out, re.MULTILINE)[0]))
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "\ndef " in out
    np.testing.assert_allclose(losses[0], losses[1], atol=0.002)


def test_parameters_and_optimizer_are_spread_over_the_mesh(train_gpt):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    config = training.Config(layers=1, width=32, heads=4, kv_heads=2)
    mesh = training.make_mesh("data=2,model=4")
    model = training.GPT(config, jax_flash.flash_attention, nnx.Rngs(0))
    training.shard(model, mesh)
    optimizer = training.make_optimizer(model, config)
    training.shard(optimizer, mesh)
    for node in (model, optimizer):
        shards = {
            jax.tree_util.keystr(path): array.size // array.addressable_shards[0].data.size
            for path, array in jax.tree_util.tree_leaves_with_path(
                nnx.to_pure_dict(nnx.state(node))
            )
        }
        for name, count in shards.items():
            # Two key heads do not divide by four.
            assert count == (4 if re.search("query|out|up|down", name) else 1), name


def test_fsdp_trains_as_one_device_does_and_leaves_a_part_on_each(train_gpt):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    config = training.Config(
        layers=1, width=32, heads=4, kv_heads=2, length=64, batch=2, remat="products"
    )
    rows = np.random.default_rng(0).integers(0, 20, (2, 65)).astype(np.uint8)

    def losses(text):
        mesh = training.make_mesh(text)
        split = training.Split(mesh) if mesh.size > 1 else None
        attend = split.attend if split else jax_flash.flash_attention
        model = training.GPT(config, attend, nnx.Rngs(0), split=split)
        training.shard(model, mesh, fsdp=True)
        optimizer = training.make_optimizer(model, config)
        training.shard(optimizer, mesh, fsdp=True)
        placed = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
        made = [float(training.train_step(model, optimizer, placed)) for _ in range(3)]
        for node in (model, optimizer):  # as the last step left them
            for array in jax.tree.leaves(nnx.to_pure_dict(nnx.state(node))):
                whole = array.ndim < 2
                assert len(array.sharding.device_set) == mesh.size
                part = array.addressable_shards[0].data.size
                assert array.size == (part if whole else mesh.size * part)
        return made

    one = losses("data=1")
    assert one[2] < one[0]
    np.testing.assert_allclose(losses("data=2,seq=4"), one, rtol=1e-5)


def test_attention_in_float8_trains_as_in_16_bits(train_gpt):
    config = training.Config(
        layers=1, width=64, heads=1, kv_heads=1, length=64, steps=9, dtype="bfloat16"
    )
    rows = np.random.default_rng(0).integers(0, 20, (4, 65)).astype(np.uint8)

    def losses(name):
        model = training.GPT(config, train_gpt.ATTENTION[name], nnx.Rngs(0))
        optimizer = training.make_optimizer(model, config)
        made = [float(training.train_step(model, optimizer, rows)) for _ in range(9)]
        assert train_gpt.generate(model, "ab", 3)  # from its cache
        return np.array(made)

    plain = losses("flash")
    assert plain[8] < plain[0] - 1
    assert 0 < np.abs(losses("fp8") - plain).max() < 0.02


def test_the_picture_shows_every_validation_and_has_a_title(train_gpt, tmp_path, monkeypatch):
    figure = train_gpt.Figure()
    monkeypatch.setattr(train_gpt, "Figure", lambda **settings: figure)
    validation = {0: 5.5, 4: 3.0, 8: 2.0}
    train_gpt.plot(tmp_path / "loss.png", "a title", [5.0] * 8, validation, 2.5)
    (axes,) = figure.axes
    assert axes.get_title() == "a title"
    (line,) = (line for line in axes.lines if line.get_label() == "validation")
    assert dict(line.get_xydata().tolist()) == validation
    bottom, top = axes.get_ylim()
    assert bottom < 2.0
    assert top > 5.5


def test_speed_is_that_of_steps_alone(train_gpt, tmp_path, monkeypatch, capsys):
    """Steps of a second, queued on a device, beside an hour for compiling and for validation."""
    clock = types.SimpleNamespace(now=0.0, idle=0.0)  # idle: when the device has done its queue

    class Loss:
        def __init__(self):
            clock.now += 0 if compiled else 3600
            compiled.append(True)
            self.done = clock.idle = max(clock.now, clock.idle) + 1

        def __float__(self):
            clock.now = max(clock.now, self.done)
            return 5.0

    def evaluate(model, rows):
        clock.now = clock.idle = max(clock.now, clock.idle) + 3600
        return 5.0

    class Progress(train_gpt.tqdm):
        def set_postfix_str(self, text, **settings):
            shown.append(text)

    shown, compiled = [], []
    arguments = ["train_gpt.py", *SMALL, "--steps=20", f"--plot={tmp_path / 'loss.png'}"]
    arguments += ["--text", str(Path(jax_flash.__file__).parent)]
    monkeypatch.setattr(sys, "argv", [*arguments, f"--checkpoint={tmp_path / 'model'}"])
    monkeypatch.setattr(train_gpt, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(train_gpt, "tqdm", Progress)
    monkeypatch.setattr(train_gpt, "evaluate", evaluate)
    monkeypatch.setattr(train_gpt, "generate", lambda *arguments: "")
    monkeypatch.setattr(train_gpt.nnx, "cached_partial", lambda *arguments: lambda rows: Loss())
    train_gpt.main()
    assert len(shown) == 20
    assert "tokens/s" not in shown[0]
    assert all(text.endswith(f", {8 * 64} tokens/s") for text in shown[1:])
    assert "1000.0 ms" in capsys.readouterr().out


def test_packed_rows_overlap_by_their_targets(train_gpt):
    rows = training.pack([b"abcde", b"fg"], 3)
    np.testing.assert_array_equal(rows, [list(b"\x00abc"), list(b"cde\x00")])


def test_bigram_loss_of_a_certain_successor(train_gpt):
    rows = np.frombuffer(b"ab" * 50_000, np.uint8)[None]
    assert training.bigram_loss(rows, rows) < 0.01


def primitives(jaxpr):
    """Names of all equations, those of functions that equations call among them."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            if hasattr(value, "eqns"):
                yield from primitives(value)


def test_remat_computes_again_what_it_does_not_keep():
    config = training.Config(layers=2, width=32, heads=4, kv_heads=2, length=16)
    rows = np.zeros((2, 17), np.uint8)

    def counts(remat):
        model = training.GPT(
            dataclasses.replace(config, remat=remat), jax_flash.flash_attention, nnx.Rngs(0)
        )
        graph, parameters = nnx.split(model)
        grad = jax.grad(lambda parameters: training.loss_fn(nnx.merge(graph, parameters), rows))
        found = collections.Counter(primitives(jax.make_jaxpr(grad)(parameters)))
        return [found[name] for name in ("flash_forward", "dot_general", "tanh")]

    kernels, products, gelus = counts("none")
    assert kernels == config.layers
    assert counts("products") == [kernels, products, gelus + config.layers]
    # What attention returns is kept: its projection, and the last of the network, are not needed.
    again = 4 + 1  # query, key, value, out, up
    assert counts("attention") == [kernels, products + again * config.layers, gelus + config.layers]


def test_loss_and_gradient_are_those_of_a_lookup_and_whole_scores():
    """The embedding by a product, what is computed again, and scores in parts change nothing."""
    config = training.Config(
        layers=1, width=16, heads=2, kv_heads=1, vocabulary=300, length=5, remat="products"
    )
    model = training.GPT(config, jax_flash.flash_attention, nnx.Rngs(0))
    of_all = dataclasses.replace(config, remat="none")  # and JAX's gradient of the network
    kept = training.GPT(of_all, jax_flash.flash_attention, nnx.Rngs(0))
    rows = np.random.default_rng(0).integers(0, 3, (4096, 6)).astype(np.uint8)
    assert 8192 // len(rows) == 2  # of 5 positions: two whole parts and a rest

    def plain(model, rows):
        inputs, targets = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
        x = model.embedding(inputs)
        for block in model.blocks:
            x = block(x, np.cumsum(inputs == training.START, axis=1, dtype=np.int32), False)
        scores = model.embedding.attend(model.norm(x))
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    loss, gradient = nnx.jit(nnx.value_and_grad(training.loss_fn))(model, rows)
    plain_loss, plain_gradient = nnx.jit(nnx.value_and_grad(plain))(kept, rows)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
    jax.tree.map(
        # Sums of 20480 positions in another order.
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max()),
        nnx.to_pure_dict(gradient),
        nnx.to_pure_dict(plain_gradient),
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("positions", [24, 1000])  # several parts and a rest; all at once
def test_the_loss_has_no_scores_of_all_positions(weighted, positions):
    rng = np.random.default_rng(0)
    rows, length, width, words = 3, 40, 8, 211
    features = rng.standard_normal((rows, length, width), np.float32)
    table = rng.standard_normal((words, width), np.float32)
    targets = rng.integers(0, words, (rows, length))
    weights = rng.random((rows, length), np.float32) * (rng.random((rows, length)) < 0.5)
    given = weights if weighted else None

    def in_parts(features, table):
        return 3 * training.cross_entropy(features, table, targets, given, 1, positions)

    def plain(features, table):
        scores = features @ table.T
        lacking = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
        return 3 * (lacking.mean() if given is None else (given * lacking).sum() / given.sum())

    steps = [jax.jit(jax.value_and_grad(f, (0, 1))) for f in (in_parts, plain)]
    found, wanted = (step(features, table) for step in steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)
    np.testing.assert_allclose(
        in_parts(features, table), wanted[0], rtol=1e-6
    )  # not differentiated

    def most(step):
        text = step.lower(features, table).compile().as_text()
        shapes = re.findall(r"\b[fs]\d+\[([\d,]+)\]", text)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    together = min(rows * length, positions // rows * rows)
    assert most(steps[0]) == max(together * words, words * width)
    assert most(steps[1]) == rows * length * words


def test_presets_that_are_named_exist(train_gpt):
    texts = (EXAMPLES.parent / "README.md").read_text() + train_gpt.__doc__
    named = set(re.findall(r"--preset (\w+)", texts))
    assert {"gpt2", "long", "1b3"} <= named <= set(training.PRESETS)


def test_generate_continues_prompts_of_a_saved_model(
    train_gpt, generate, tmp_path, monkeypatch, capsys
):
    config = training.Config(layers=1, width=32, heads=4, kv_heads=2, length=16)
    model = training.GPT(config, jax_flash.flash_attention, nnx.Rngs(3))
    path = tmp_path / "model.msgpack"
    training.save(path, model)
    loaded = training.load(path)
    assert loaded.config == config
    jax.tree.map(
        np.testing.assert_array_equal,
        *(nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (loaded, model)),
    )
    command = ["generate.py", f"--checkpoint={path}", "--count=5", "--prompt=ab", "--prompt=import"]
    written = []
    for option in ([], ["--page-size=4"]):
        monkeypatch.setattr(sys, "argv", command + option)
        generate.main()
        out = capsys.readouterr().out
        assert "tokens/s, 2 rows at once" in out
        assert float(re.findall(r"scores    (\S+)", out)[0]) < 1e-4
        assert ("pages     5 of 4 bytes" in out) == bool(option)  # of 8 and 12 bytes
        written.append(out.split("\nspeed")[0])
    assert written[0].count("---") == 2
    assert written[0] == written[1]
    # Greedy: what one pass over the text without a cache finds likeliest after each byte.
    texts = [b"ab", b"import"]
    got = generate.generate(loaded, texts, 5, temperature=0.0)
    for text, row in zip(texts, got.tokens, strict=True):
        tokens = [0, *text, *row.tolist()]
        logits = model(np.array([tokens[:-1]]))[0, len(text) :, :256]
        np.testing.assert_array_equal(row, np.argmax(logits, axis=-1))
