"""Owns `advise`: what of a traced function's calls costs more than it has to.

`graph.py` follows a value back to what it was made of, `masks.py` reads what a mask hides,
`heads.py` which axes of an array were repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_flash import _backends, _gpu
from jax_flash._advise import heads, masks
from jax_flash._advise.graph import Graph, Node, Unknown
from jax_flash._call import Call

_OF_MASKS = ("causal", "window", "documents", "padding", "nothing hidden")
_CALLS = ("flash_forward", "flash_decode", "flash_ragged")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that costs more than it has to.

    Attributes:
      kind: "causal", "window", "documents", "padding" or "nothing hidden", of a mask or bias that
        is only that; "bias", one that is a mask; "unknown", one that shapes alone do not tell;
        "repeated heads"; "values in keys"; "float32"; "xla".
      place: "file.py:12 (function)", where the call stands; "" where that is not known.
      found: what the call has.
      instead: what to write in its place.
    """

    kind: str
    place: str
    found: str
    instead: str

    def __str__(self) -> str:
        where = self.place or "somewhere"
        return f"{where}: {self.kind}\n  {self.found}\n  instead: {self.instead}"


@dataclasses.dataclass(frozen=True, repr=False)
class Advice:
    """What `advise` found; printing it shows all.

    Attributes:
      calls: at how many places of the source the function calls jax_flash. Calls without a query
        or without a key compute nothing, and are not counted.
      findings: in the order of the program.
    """

    calls: int
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        if not self.calls:
            return (
                "no call of jax_flash with queries and keys (jax_flash.dot_product_attention takes "
                "the arguments of jax.nn.dot_product_attention)"
            )
        calls = f"{self.calls} call{'s' * (self.calls > 1)} of jax_flash"
        if not self.findings:
            return f"{calls}, nothing to change"
        return "\n\n".join([f"{calls}, to change:", *map(str, self.findings)])


def advise(f: Callable[..., Any], *args: Any, gpu: str | None = None, **kwargs: Any) -> Advice:
    """Tells what of the calls in f(*args, **kwargs) is slower than another way to say the same.

    f is traced, not run, under `jax.grad` too if f is a gradient. Masks and biases are computed
    from the arrays that are given, where no matrix product and no loop is before them, and what
    they hide is compared with causality, windows, lengths and segment ids: the advice holds for
    these arrays. Of `jax.ShapeDtypeStruct` only what needs no array is told.

    Arguments:
      f: a function with calls of `flash_attention` or of what is made of it, such as a layer, a
        model or a loss; jitted or not.
      args, kwargs: f's arguments. Arrays and shapes are traced, all else is taken as it is.
      gpu: a GPU to advise for, as in `explain`; None takes the one present.

    Returns: the Advice; print it, or read its findings.

    Raises: TypeError for an f that is no function, ValueError for a GPU of unknown name; what f
    raises when it is traced.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_flash
      >>> def attend(query, key, value):
      ...     key, value = (jnp.repeat(x, 4, axis=2) for x in (key, value))
      ...     mask = jnp.tril(jnp.ones((64, 64), bool))
      ...     return jax_flash.flash_attention(query, key, value, mask=mask)
      >>> query, key = jnp.ones((2, 64, 8, 16)), jnp.ones((2, 64, 2, 16))
      >>> [finding.kind for finding in jax_flash.advise(attend, query, key, key).findings]
      ['causal', 'repeated heads']
    """
    if not callable(f):
        raise TypeError(f"f is {type(f).__name__}; expected a function, its arguments behind it")
    spec = _gpu.spec.present() if gpu is None else _gpu.spec.named(gpu)
    graph = Graph.of(f, args, kwargs)
    places, found = set(), []
    for node in graph.equations("flash_"):
        call = node.equation.params.get("call")
        if not isinstance(call, Call):
            continue
        if node.name in _CALLS:
            places.add(node.place)
        found += _of_call(call, graph, node, spec)
    # What a backward pass computes again has its mask from memory.
    read = {x.place for x in found if x.kind in _OF_MASKS}
    told = (x for x in found if x.kind != "unknown" or x.place not in read)
    return Advice(len(places), tuple(dict.fromkeys(told)))


def _of_call(call: Call, graph: Graph, node: Node, gpu: _gpu.GpuSpec | None) -> Iterator[Finding]:
    operands = call.name_operands(graph.inputs(node))
    shapes = call.shapes({name: x.aval for name, x in operands.items()})
    if node.name in _CALLS:
        if node.name == "flash_forward":
            for name in ("mask", "bias"):
                if name in operands:
                    yield from _of_mask(name, graph, operands[name], node.place)
            yield from _of_heads(graph, operands, node.place)
        if node.name != "flash_forward" or "indices" in operands:
            yield from _of_values(graph, operands, node)
        yield from _of_dtype(graph, operands, node.place)
    yield from _of_backend(call, shapes, node, gpu)


def _of_mask(name: str, graph: Graph, operand: Node, place: str) -> Iterator[Finding]:
    what = f"{name} {[*operand.aval.shape]}"
    try:
        values = graph.value(operand)
    except Unknown as reason:
        if name == "mask" and 1 not in operand.aval.shape[-2:]:
            yield Finding(
                "unknown",
                place,
                f"{what} of all queries and keys is read; {reason}",
                "an option, if it is causal, a window, lengths or segment ids",
            )
        return
    hidden = None
    if name == "bias":
        hidden = masks.hidden_by(values)
        if hidden is None:
            return
        what += " is 0 and large negative numbers: it"
    seen = values if hidden is None else ~hidden
    meaning = masks.read(np.asarray(seen))
    if meaning is not None:
        yield Finding(meaning.kind, place, f"{what} {meaning.found}", meaning.instead)
    elif hidden is not None:
        yield Finding("bias", place, f"{what} is added to each score", "a boolean mask of the same")


def _of_heads(graph: Graph, operands: dict[str, Node], place: str) -> Iterator[Finding]:
    times = {
        name: count
        for name in ("k", "v")
        if (count := heads.repeats(graph, operands[name], axis=-2)) > 1
    }
    if times:
        names = " and ".join({"k": "key", "v": "value"}[name] for name in times)
        own, count = operands["k"].aval.shape[-2], min(times.values())
        yield Finding(
            "repeated heads",
            place,
            f"heads of {names} are repeated {count} times before the call",
            f"key and value of {own // count} heads as they are, beside {own} of query",
        )


def _of_values(graph: Graph, operands: dict[str, Node], node: Node) -> Iterator[Finding]:
    # Values with scales may have others than their keys.
    if "v" not in operands or "value_scale" in operands:
        return
    if not _are_first(graph, operands["v"], operands["k"]):
        return
    if "new_v" in operands and not _are_first(graph, operands["new_v"], operands["new_k"]):
        return
    dim = operands["v"].aval.shape[-1]
    yield Finding(
        "values in keys",
        node.place,
        f"the values are the first {dim} features of the keys, copied",
        f"None for the values and value_dim={dim}: kernels read both at once",
    )


def _are_first(graph: Graph, values: Node, keys: Node) -> bool:
    """Whether values are the first features of all keys, of each head."""
    part = graph.origin(values)
    if part.name != "slice":
        return False
    given, params = graph.inputs(part)[0], part.equation.params
    whole = graph.origin(given)
    return (
        whole is graph.origin(keys)
        and not any(params["start_indices"])
        and (params["strides"] is None or params["strides"][-1] == 1)
        and part.aval.shape[:-1] == given.aval.shape[:-1]
        # Reshaped by what is ahead of the features alone.
        and part.aval.shape[-1] == values.aval.shape[-1]
        and whole.aval.shape[-1] == given.aval.shape[-1] == keys.aval.shape[-1]
    )


def _of_dtype(graph: Graph, operands: dict[str, Node], place: str) -> Iterator[Finding]:
    if operands["q"].aval.dtype != np.float32:
        return
    widened = graph.first_widened([operands[name] for name in ("q", "k", "v")])
    if widened is not None:
        where, dtype = widened
        at = f" at {where}" if where else ""
        yield Finding(
            "float32",
            place,
            f"query, key and value are float32, of {dtype} that became float32{at}",
            f"{dtype}: query.astype({dtype!r}), and key and value, before the call",
        )


def _of_backend(call: Call, shapes: Any, node: Node, gpu: _gpu.GpuSpec | None) -> Iterator[Finding]:
    if call.backend is not None:
        return
    backend, refusals = _backends.pick(call, shapes, gpu)
    wanted = "cpu" if gpu is None else "cuda"
    reasons = [x for x in refusals.get(wanted, ()) if x != _gpu.few_scores.REASON]
    if backend != "xla" or not reasons:
        return
    instead = "a call that its kernels run: jax_flash.explain has all reasons"
    if call.problem.dtype == "float64":
        instead = "float32 or 16 bits, for which there are kernels"
    elif call.problem.score is not None:
        instead = "an option that means the same (softcap, a window), if there is one"
    name = call.target
    yield Finding("xla", node.place, f"{name} runs without kernels: {'; '.join(reasons)}", instead)
