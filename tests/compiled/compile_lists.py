"""Which problems of 16 bits are compiled for Hopper: `tuned` always, `others` where they add pairs.

Under each name: the problem and its shapes.
"""

import dataclasses
import itertools
from typing import Any

from jax_flash._problem import BlockMaskShape, Shapes, TermShape

from .compile_cases import (
    DROPOUT,
    FEATURES,
    LENGTHS,
    PLAIN,
    PLAIN_DIMS,
    POSITIONS,
    SEGMENTS,
    SHAPES,
    Configurations,
    biases,
    dropouts,
    functions_of_scores,
    masks,
    positions,
)


def tuned(name: str) -> Configurations:
    """What is compiled always for a pass: plain kernels, and each schedule of theirs."""
    yield "128/128", PLAIN, SHAPES
    tile = dataclasses.replace(SHAPES, q_len=64, kv_len=64, head_dim=64, value_dim=64)
    bias = TermShape("bfloat16", batch=1, heads=16, queries=64, keys=64)
    mask = TermShape("bool", batch=SHAPES.batch, heads=1, queries=1, keys=64)
    beside = dataclasses.replace(PLAIN, terms=("bias", "mask"))
    yield "64/64 tile, bias, mask", beside, dataclasses.replace(tile, bias=bias, mask=mask)
    for dims in PLAIN_DIMS:
        shapes = dataclasses.replace(SHAPES, head_dim=dims[0], value_dim=dims[1])
        yield f"{dims[0]}/{dims[1]} causal", dataclasses.replace(PLAIN, window=(None, 0)), shapes
    if name == "backward":
        yield from each_once(rings())
        yield from each_once(groups())
        wide = dataclasses.replace(PLAIN, window=(None, 0), deterministic=True)  # no pairs
        for dims in ((192, 192), (136, 256)):
            shapes = dataclasses.replace(SHAPES, head_dim=dims[0], value_dim=dims[1])
            yield f"{dims[0]}/{dims[1]} pairs", PLAIN, shapes
        yield f"{dims[0]}/{dims[1]} deterministic", wide, shapes
        yield from itertools.islice(one_block(), 5)
        yield from few_gradients()
        return
    short = dataclasses.replace(SHAPES, batch=32, q_len=512, kv_len=512, head_dim=64, value_dim=64)
    for window in ((None, None), (None, 0)):  # two teams
        yield f"64/64 short {window}", dataclasses.replace(PLAIN, window=window), short
    two = dataclasses.replace(short, batch=1, q_heads=32, kv_heads=32)
    yield "64/64 few units of 128 rows", dataclasses.replace(PLAIN, window=(None, 0)), two
    yield from few_units((64, "everything"), (128, "window"), (192, "lengths"), (256, "softcap"))
    for dim in (64, 128):
        of_dim = dataclasses.replace(two, q_heads=2, kv_heads=2, kv_len=4096)
        of_dim = dataclasses.replace(of_dim, head_dim=dim, value_dim=dim)
        problem = dataclasses.replace(PLAIN, window=(None, 0), bottom_right=dim == 128)
        problem = problem if dim == 128 else PLAIN
        yield f"{dim}/{dim} units in parts", problem, of_dim
    for dim in (72, 96, 128):  # three warpgroups, blocks of 112, 96 and 80 keys
        many = dataclasses.replace(SHAPES, batch=4, head_dim=dim, value_dim=dim)
        yield f"{dim}/{dim} many units", PLAIN, many
        beside = dataclasses.replace(PLAIN, window=(None, 0), terms=(*LENGTHS, "sinks"))
        yield f"{dim}/{dim} many units, lengths and sinks", beside, many
    middle = dataclasses.replace(many, batch=32, q_len=1024, kv_len=1024)
    yield "128/128 of 1024 keys", PLAIN, middle
    grouped = dataclasses.replace(middle, kv_heads=4)
    yield "128/128 of 1024 keys, groups", PLAIN, grouped
    yield "128/128 of 1024 keys, groups", dataclasses.replace(PLAIN, window=(None, 0)), grouped
    yield "128/128 of 512 keys, groups", PLAIN, dataclasses.replace(grouped, q_len=512, kv_len=512)
    for dim, right in ((64, 0), (64, None), (96, 0)):  # two teams, and three warpgroups
        problem = dataclasses.replace(PLAIN, window=(None, right))
        of_dim = dataclasses.replace(grouped, head_dim=dim, value_dim=dim)
        yield f"{dim}/{dim} of 1024 keys, groups", problem, of_dim
    yield "128/128 of 768 keys", PLAIN, dataclasses.replace(middle, q_len=768, kv_len=768)
    documents = dataclasses.replace(many, q_len=8192, kv_len=8192)
    yield "128/128 documents", dataclasses.replace(PLAIN, terms=SEGMENTS), documents


def close() -> Configurations:
    """Programs with few registers to spare, which have spilled before."""
    small = dataclasses.replace(SHAPES, head_dim=64, value_dim=64)
    bias = TermShape("float16", batch=1, heads=16, queries=4096, keys=4096)
    half = dataclasses.replace(PLAIN, dtype="float16", terms=("bias",))
    shapes = dataclasses.replace(SHAPES, bias=bias)
    for window in ((None, None), (None, 0)):
        problem = dataclasses.replace(half, window=window)
        yield f"128 float16 bias, window {window}", problem, shapes
    yield "64 float16 bias", half, dataclasses.replace(small, bias=bias)
    # Three warpgroups, or two since three would spill.
    for feature in ("causal segments", "everything", "softcap", "sinks", "lengths", "window"):
        length = 8192 if feature == "causal segments" else 4096  # units begin where documents do
        shapes = dataclasses.replace(small, q_len=length, kv_len=length)
        yield f"64/64 {feature}", dataclasses.replace(PLAIN, **FEATURES[feature]), shapes
    terms = ("block_numbers", "block_bits")
    for block, dim, window in ((128, 64, (None, 0)), (64, 64, (None, None)), (128, 8, None)):
        own = BlockMaskShape(batch=1, heads=1, block=block)
        shapes = dataclasses.replace(SHAPES, head_dim=dim, value_dim=dim, block_mask=own)
        problem = dataclasses.replace(
            PLAIN, whole_blocks=True, terms=terms, window=window or (None, None)
        )
        yield f"{dim} layout of {block}, window {window}", problem, shapes
    for name in ("deterministic causal", "deterministic segments"):
        yield name, dataclasses.replace(PLAIN, **FEATURES[name]), SHAPES
    yield from functions_of_scores(("softcap", 256))
    for name, problem, shapes in functions_of_scores(("alibi", 128)):
        terms = ("dropout_state", *problem.terms)
        yield f"{name}, dropout", dataclasses.replace(problem, **DROPOUT | {"terms": terms}), shapes
    blocks = BlockMaskShape(batch=1, heads=16, block=128)
    part = dataclasses.replace(
        SHAPES, head_dim=256, value_dim=256, block_mask=blocks, drops_part=True
    )
    terms = ("block_numbers", "block_bits", *LENGTHS, "dropout_state")
    problem = dataclasses.replace(PLAIN, window=(None, 0), **DROPOUT | {"terms": terms})
    yield "256 block mask, lengths, a part of dropout", problem, part
    mask = TermShape("bool", batch=2, heads=1, queries=4096, keys=4096)
    both = dataclasses.replace(small, mask=mask, block_mask=blocks)
    terms = ("mask", "block_numbers", "block_bits")
    yield "64/64 both masks", dataclasses.replace(PLAIN, terms=terms), both


RING_DIMS = [(64, 64), (96, 72), (128, 128), (40, 128)]


def few_units(*chosen: tuple[int, str]) -> Configurations:
    """One warpgroup, alone and beside terms."""
    few = dataclasses.replace(SHAPES, batch=1, q_len=512, kv_len=512)
    for dim, feature in chosen:
        shapes = dataclasses.replace(few, head_dim=dim, value_dim=dim)
        yield f"{dim} few units", dataclasses.replace(PLAIN, window=(None, 0)), shapes
        yield f"{dim} few units, {feature}", dataclasses.replace(PLAIN, **FEATURES[feature]), shapes


def each_once(found: Configurations) -> Configurations:
    """Each of RING_DIMS once, with a call that the dims before it have not, while there is one."""
    configurations = list(found)
    calls = len(configurations) // len(RING_DIMS)
    return (configurations[i * calls + i % calls] for i in range(len(RING_DIMS)))


def rings() -> Configurations:
    """Backward kernels with the sum of dq in a ring."""
    own = BlockMaskShape(batch=1, heads=1, block=128)
    terms = ("block_numbers", "block_bits")
    layout = dataclasses.replace(PLAIN, dtype="float16", whole_blocks=True, terms=terms)
    for head_dim, value_dim in RING_DIMS:
        shapes = dataclasses.replace(SHAPES, batch=8, head_dim=head_dim, value_dim=value_dim)
        of_layout = dataclasses.replace(shapes, q_len=16384, kv_len=16384, block_mask=own)
        short = dataclasses.replace(shapes, batch=24, q_len=1025, kv_len=1024)
        name = f"ring {head_dim}/{value_dim}"
        yield name, PLAIN, short
        yield f"{name} causal", dataclasses.replace(PLAIN, window=(None, 0)), short
        yield f"{name} layout", layout, of_layout


def one_block() -> Configurations:
    """Backward kernels that store dq: plain ones, and one with many terms, first."""
    causal = dataclasses.replace(PLAIN, window=(None, 0))
    short = dataclasses.replace(SHAPES, q_len=100, kv_len=100)
    for head_dim, value_dim in ((64, 64), (128, 128), (192, 192), (100, 36)):
        shapes = dataclasses.replace(short, head_dim=head_dim, value_dim=value_dim)
        yield f"one block {head_dim}/{value_dim} causal", causal, shapes
    for dim in (128, 64):
        shapes = dataclasses.replace(short, head_dim=dim, value_dim=dim)
        for name in ("everything", "causal segments", "lengths", "window", "softcap"):
            problem = dataclasses.replace(PLAIN, **FEATURES[name])
            yield f"one block {dim} {name}", problem, shapes
        mask = TermShape("bool", batch=2, heads=16, queries=100, keys=100)
        bias = TermShape("bfloat16", batch=1, heads=16, queries=100, keys=100)
        yield f"one block {dim} dropout", dataclasses.replace(causal, **DROPOUT), shapes
        both = dataclasses.replace(PLAIN, terms=("bias", "mask"))
        yield f"one block {dim} bias mask", both, dataclasses.replace(shapes, bias=bias, mask=mask)
    for dims in ((136, 256), (256, 256)):
        shapes = dataclasses.replace(short, head_dim=dims[0], value_dim=dims[1], kv_len=60)
        yield f"one block {dims[0]}/{dims[1]}", PLAIN, shapes


def few_gradients() -> Configurations:
    """Backward kernels of fewer units than multiprocessors: 64 keys of a CTA, and shared walks."""
    for dim, heads, length in ((64, 12, 512), (128, 6, 512), (64, 3, 2048), (128, 1, 4096)):
        shapes = Shapes(1, length, length, heads, heads, dim, dim)
        yield (
            f"few units {dim}/{dim} of {length}",
            dataclasses.replace(PLAIN, window=(None, 0)),
            shapes,
        )
    for dims in ((192, 192), (136, 256)):
        for right in (None, 0):
            problem = dataclasses.replace(PLAIN, window=(None, right))
            yield f"few units {dims[0]}/{dims[1]}", problem, Shapes(1, 1376, 1376, 1, 1, *dims)


def groups() -> Configurations:
    """Backward kernels whose units are some query heads of a group."""
    for head_dim, value_dim in RING_DIMS:
        shapes = dataclasses.replace(
            SHAPES, q_heads=16, kv_heads=4, head_dim=head_dim, value_dim=value_dim
        )
        causal = dataclasses.replace(PLAIN, window=(None, 0))
        in_turns = dataclasses.replace(causal, deterministic=True)
        segments = dataclasses.replace(in_turns, dtype="float16", terms=SEGMENTS)
        name = f"groups {head_dim}/{value_dim}"
        yield f"{name} causal", causal, dataclasses.replace(shapes, batch=16, q_len=2048)
        yield f"{name} window", dataclasses.replace(PLAIN, window=(1024, 0)), shapes
        yield f"{name} deterministic", in_turns, shapes
        yield f"{name} segments, deterministic", segments, shapes


def others(name: str) -> Configurations:
    """All others of a pass, in the order in which those that cover as much are taken."""
    yield from close()
    if name == "backward":
        yield from (*rings(), *groups(), *one_block())
    for dims in PLAIN_DIMS:  # whose causal kernels need more registers
        shapes = dataclasses.replace(SHAPES, head_dim=dims[0], value_dim=dims[1])
        yield f"{dims[0]}/{dims[1]}", PLAIN, shapes
    yield from together()
    for name, change in FEATURES.items():
        yield name, dataclasses.replace(PLAIN, **change), SHAPES
    odd = dataclasses.replace(SHAPES, q_len=4095)  # dq does not hold half of its own sum
    for dim in (64, 128, 256):
        shapes = dataclasses.replace(odd, head_dim=dim, value_dim=dim)
        for turns in (False, True):
            problem = dataclasses.replace(PLAIN, window=(None, 0), deterministic=turns)
            yield f"{dim} causal odd{' deterministic' * turns}", problem, shapes
    yield "grouped heads", PLAIN, dataclasses.replace(SHAPES, kv_heads=4)
    for dims in [(100, 100), (33, 7), (127, 120), (255, 255)]:
        shapes = dataclasses.replace(SHAPES, head_dim=dims[0], value_dim=dims[1])
        yield f"{dims[0]}/{dims[1]}", PLAIN, shapes
    yield from few_units(*itertools.product((64, 128, 256), FEATURES))
    yield from masks()
    yield from dropouts()
    yield from biases()
    yield from positions()
    yield from functions_of_scores(
        *itertools.product(("alibi", "softcap", "table"), (64, 128, 256))
    )
    everything = dataclasses.replace(PLAIN, **FEATURES["everything"])
    yield "100/36 everything", everything, dataclasses.replace(SHAPES, head_dim=100, value_dim=36)


def together() -> Configurations:
    """Many features in one program, chosen so that none is spilled."""
    mask = TermShape("bool", batch=2, heads=1, queries=4096, keys=4096)
    bias = TermShape("bfloat16", batch=1, heads=16, queries=4096, keys=4096)
    of_queries = dataclasses.replace(bias, dtype="float32", keys=1)
    packed = {"q_len": 16, "kv_heads": 4}
    window: dict[str, Any] = {"window": (1024, 100)}
    causal: dict[str, Any] = {"window": (None, 0)}
    many = (*LENGTHS, *SEGMENTS, *POSITIONS)
    blocks = ("block_numbers", "block_bits")
    layout: dict[str, Any] = DROPOUT | {"whole_blocks": True}
    own = BlockMaskShape(batch=1, heads=1, block=128)
    # Terms of each, and the head and value dims.
    chosen: list[tuple[dict, dict, tuple[tuple[int, int], ...]]] = [
        (window | {"terms": many}, {}, ((64, 64), (128, 128), (255, 255))),
        (
            causal | {"terms": (*many, "sinks"), "deterministic": True},
            {},
            ((64, 64), (128, 128)),
        ),
        (
            {"window": (1024, 0), "terms": (*many, "sinks"), "deterministic": True},
            {},
            ((256, 256),),
        ),
        (
            causal | DROPOUT | {"terms": (*POSITIONS, "dropout_state"), "softcap": 30.0},
            {},
            ((64, 64), (128, 128), (256, 256)),
        ),
        (
            {"window": (1024, 0), "terms": ("bias", *SEGMENTS, *POSITIONS), "softcap": 30.0},
            {"bias": of_queries},
            ((256, 256),),
        ),
        (window | {"terms": POSITIONS, "dtype": "float16"}, packed, ((33, 7),)),
        (
            causal | {"terms": ("bias", *LENGTHS, *POSITIONS, "sinks")},
            {"bias": bias},
            ((64, 64), (128, 128)),
        ),
        (
            {"window": (1024, 0), "terms": ("bias", *POSITIONS, "sinks"), "dtype": "float16"},
            {"bias": bias},
            ((64, 64), (128, 128)),
        ),
        (
            DROPOUT | {"window": (1024, None), "terms": ("mask", *POSITIONS, "dropout_state")},
            {"mask": mask},
            ((64, 64), (128, 128)),
        ),
        (
            DROPOUT
            | {
                "terms": ("bias", "mask", "dropout_state"),
                "dropout_rate": 0.99,
                "dtype": "float16",
            },
            {"bias": bias, "mask": mask},
            ((64, 64), (128, 128)),
        ),
        (
            causal | {"terms": ("bias", *blocks), "deterministic": True},
            {"bias": bias, "block_mask": BlockMaskShape(batch=1, heads=16, block=128)},
            ((64, 64),),
        ),
        (
            causal
            | layout
            | {"terms": (*blocks, *SEGMENTS, *POSITIONS, "dropout_state"), "softcap": 30.0},
            {"block_mask": own},
            ((64, 64),),
        ),
        (
            {"whole_blocks": True, "softcap": 30.0, "terms": ("bias", *blocks)},
            {"bias": of_queries, "block_mask": own},
            ((128, 128),),
        ),
        (
            {"window": (1024, 0), "softcap": 30.0, "deterministic": True, "whole_blocks": True}
            | {"terms": (*blocks, *LENGTHS, "sinks")},
            {"block_mask": own},
            ((256, 256),),
        ),
    ]
    for change, of, dims in chosen:
        problem = dataclasses.replace(PLAIN, **change)
        for head_dim, value_dim in dims:
            shapes = dataclasses.replace(SHAPES, head_dim=head_dim, value_dim=value_dim, **of)
            yield f"{head_dim}/{value_dim} {' '.join(problem.terms)}", problem, shapes
    of_keys = dataclasses.replace(bias, queries=1)
    for dim, dtype in [(64, "bfloat16"), (256, "float32")]:
        for _, problem, shapes in functions_of_scores(("alibi", dim)):
            problem = dataclasses.replace(problem, terms=("bias", *problem.terms), window=(None, 0))
            shapes = dataclasses.replace(shapes, bias=dataclasses.replace(of_keys, dtype=dtype))
            yield f"{dim} alibi as a function and bias of keys", problem, shapes
    for _, problem, shapes in functions_of_scores(("table", 64)):
        problem = dataclasses.replace(problem, terms=("bias", *problem.terms))
        shapes = dataclasses.replace(shapes, bias=of_queries)
        yield "64 table as a function and bias of queries", problem, shapes
