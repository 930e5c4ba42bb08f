"""What the CUDA handlers are expected to launch for a case, and with which arguments.

It follows from families/sm90_params.h, the kernels' own description of what they index, and the
constants that the launched program was compiled with.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .cases import Case, dropout_words
from .fake_cuda import Call, Launch, Pointer, Recording

WORKSPACES = {
    "forward": (
        "unit_counter", "segment_ranges", "segment_plan", "marks", "key_position_ranges",
        "query_position_ranges", "mask_words", "mask_flags", "block_flags",
    ),
    "backward": (
        "turns", "lse_log2", "minus_delta", "dq_sum", "next_unit",
        "query_segment_ranges", "key_segment_ranges", "query_position_ranges",
        "key_position_ranges", "marks", "mask_words", "mask_flags", "block_flags", "dbias_sum",
    ),
}  # fmt: skip


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def scale_of(case: Case) -> float:
    return case.H**-0.5 if case.scale is None else case.scale


def common_params(case: Case, c: dict[str, int]) -> dict[str, Any]:
    scale = scale_of(case)
    left, right = case.window if isinstance(case.window, tuple) else (None, None)
    if case.causal:
        right = 0
    assert (c["kHeadDim"], c["kValueDim"]) == (case.H, case.value_dim)
    assert c["kBFloat16"] == (case.dtype == "bfloat16")
    placed = case.positions is not None and (left, right) != (None, None)
    assert c["kHasPositions"] == placed
    for side, name in ((left, "Left"), (right, "Right")):  # of indices, or of positions
        assert c[f"kWindow{name}"] == (side is not None and not placed)
        assert c[f"kReach{name}"] == (side is not None and placed)
    assert c["kHasDropout"] == (case.dropout > 0)
    assert c["kDropsMost"] == (case.dropout > 31 / 32)
    assert c["kHasScoreFunction"] == (case.score is not None)
    assert c["kHasScoreIds"] == (case.score == "alibi")
    return {
        "query_data": "query",
        "key_data": "key",
        "value_data": "value",
        "query_lengths": "query_seq_lengths" if c["kHasQueryLengths"] else None,
        "key_value_lengths": "key_value_seq_lengths" if c["kHasKeyValueLengths"] else None,
        "query_segments": "query_segment_ids" if c["kHasSegments"] else None,
        "key_value_segments": "key_value_segment_ids" if c["kHasSegments"] else None,
        "batch": math.prod(case.batch),
        "query_len": case.T,
        "kv_len": case.S,
        "query_heads": case.N,
        "kv_heads": case.kv_heads,
        "query_positions": "query_positions" if placed else None,
        "key_value_positions": "key_value_positions" if placed else None,
        "window_left": (left or 0) - (2**32 if left and left >= 2**31 else 0),  # uint32, bits of it
        "window_right": right or 0,
        "scale": np.float32(scale),
        "scale_log2": np.float32((case.softcap or (1.0 if case.score else scale)) / math.log(2)),
        "softcap_inner": np.float32(scale / case.softcap) if case.softcap else 0.0,
        "dropout_state": "dropout_state" if c["kHasDropout"] else None,
        "score_ids": "score_ids" if c["kHasScoreIds"] else None,
        "captures": [
            {"data": "table" if case.score and i == 0 else None, "batch": 0} for i in range(8)
        ],
        "dropout_threshold": round(case.dropout * 2**15) * 0x10001,
        "dropout_scale": np.float32(1 / (1 - round(case.dropout * 2**15) / 2**15)),
        "result_scale": None,
    }


def backward_params(case: Case, call: Call, c: dict[str, int]) -> dict[str, Any]:
    """The parameters of a family's backward kernels, but for maps."""
    batch = math.prod(case.batch)
    query_blocks = ceil_div(case.T, c["kBlockQ"])
    key_blocks = ceil_div(case.S, c["kBlockKV"])
    compact, few = c["kCompact"], c["kCompact"] and query_blocks == 1
    heads, blocked = batch * case.N, query_blocks * c["kBlockQ"]
    numbers = heads * (4 * ceil_div(case.T, 4) if few else blocked)
    columns = case.H // 2 if c["kDqRowBytes"] else 64 * ceil_div(case.H, 64)
    sums = heads * (case.T * case.H if compact else blocked * columns)
    marks = ceil_div(case.S, 16) if compact else key_blocks * c["kBlockKV"] // 16
    turns = batch * case.N * query_blocks * c["kTurnParts"]
    expected = common_params(case, c) | {
        "out_data": "out",
        "dout_data": "dout",
        "lse": "lse",
        "dlse": "dlse" if c["kHasDlse"] else None,
        "dquery": "dquery",
        "dkey_data": "dkey",
        "dvalue_data": "dvalue",
        "lse_log2": f"float32[{numbers}]",
        "minus_delta": f"float32[{numbers}]",
        "dq_sum": f"float32[{sums}]",
        "next_unit": "int32[1]",
        "turns": f"int32[{turns}]" if c["kDeterministic"] else None,
        "query_segment_ranges": f"int32[{batch * query_blocks * 2}]" if c["kHasSegments"] else None,
        "key_segment_ranges": f"int32[{batch * key_blocks * 2}]" if c["kHasSegments"] else None,
        "query_position_ranges": (
            f"int32[{batch * query_blocks * 2}]" if c["kHasPositions"] else None
        ),
        "key_position_ranges": f"int32[{batch * key_blocks * 2}]" if c["kHasPositions"] else None,
        "marks": f"int32[{batch * case.kv_heads * marks * 2}]",
    }
    expected |= mask_params(case, c, c["kBlockQ"], by_key=True) | bias_params(case, c)
    return expected | check_dbias(case, call, c)


def term_sizes(case: Case, axes: str | None) -> tuple[int, int, int, int]:
    """Batch rows, heads, queries and keys of a bias or mask; zeros without one."""
    if axes is None:
        return 0, 0, 0, 0
    sizes = {"b": math.prod(case.batch), "n": case.N, "t": case.T, "s": case.S, "1": 1}
    batch, heads, queries, keys = (sizes[letter] for letter in axes)
    return batch, heads, queries, keys


def check_mask_plan(
    case: Case, before: list[Launch], c: dict[str, int], rows: int, *, by_key: bool = False
) -> list[Launch]:
    """Checks the launch that plans the masks; returns the others.

    A CTA is for 128 blocks of pairs of a block mask, 32 in a row, or for one of a boolean mask.
    """
    batch, heads, queries, keys = term_sizes(case, case.mask)
    assert c["kHasMask"] == (batch > 0 or case.blocks is not None)
    assert c["kHasMaskBytes"] == (batch > 0)
    assert c["kMaskBlock"] == (0 if case.blocks is None else case.blocks[1])
    if not c["kHasMask"]:
        return before
    plan, *others = before
    blocks = batch * heads * ceil_div(queries, rows) * ceil_div(keys, c["kBlockKV"])
    blocks += ceil_div(flags_of_blocks(case, c, rows, by_key=by_key), 128)
    assert (plan.entry, plan.grid, plan.block) == ("mask_plan", [blocks, 1, 1], [128, 1, 1])
    assert (c["kByteQueries"], c["kByteKeys"]) == (queries > 1, keys > 1)
    if case.blocks is None:
        assert (c["kMaskQueries"], c["kMaskKeys"]) == (queries > 1, keys > 1)
    else:
        assert c["kMaskQueries"]
        assert c["kMaskKeys"]
    return others


def flags_of_blocks(case: Case, c: dict[str, int], rows: int, *, by_key: bool) -> int:
    if case.block_mask is None:
        return 0
    parts = math.prod(case.block_mask.numbers.shape[:-2])
    blocks = [ceil_div(case.T, rows), ceil_div(case.S, c["kBlockKV"])]
    lines, columns = reversed(blocks) if by_key else blocks
    return parts * lines * ceil_div(columns, 32) * 32


def block_mask_params(case: Case, c: dict[str, int], rows: int, *, by_key: bool) -> dict[str, Any]:
    m = case.block_mask
    if m is None:
        nothing = {"numbers": None, "bits": None, "flags": None, "bits_batch": 0}
        return nothing | {"batch": 0, "head": 0, "stored": 0, "flag_count": 0}
    axes, block = case.blocks or ("", 0)
    *_, stored, _, _ = m.bits.shape
    heads = case.N if axes[1] == "n" else 1
    flags = flags_of_blocks(case, c, rows, by_key=by_key)
    return {
        "numbers": "block_numbers",
        "bits": "block_bits",
        "flags": f"int32[{flags // 8}]",
        "bits_batch": stored * block * block // 16 if axes[0] == "b" else 0,
        "batch": heads if axes[0] == "b" else 0,
        "head": int(heads > 1),
        "stored": max(stored, 1),  # a layout stores none
        "flag_count": flags,
    }


def mask_params(case: Case, c: dict[str, int], rows: int, *, by_key: bool) -> dict[str, Any]:
    batch, heads, queries, keys = term_sizes(case, case.mask)
    nothing = {"data": None, "batch": 0, "head": 0, "query": 0, "key": 0}
    blocks = {"block_mask": block_mask_params(case, c, rows, by_key=by_key)}
    if batch == 0:
        mask = {"bytes": nothing, "words": None, "flags": None, "batch": 0, "head": 0}
        return {"mask": mask} | blocks
    # A row of bits is one of queries (forward; of whole blocks) or keys; its words those of a block
    # of the others.
    lines, columns, block = ceil_div(queries, rows) * rows, keys, c["kBlockKV"]
    if by_key:
        lines, columns, block = keys, queries, rows
    words = 1 if columns == 1 else {48: 2, 64: 2}.get(block, 4)
    flags = batch * heads * ceil_div(queries, rows) * ceil_div(keys, c["kBlockKV"])
    strides = {
        "batch": heads * queries * keys if batch > 1 else 0,
        "head": queries * keys if heads > 1 else 0,
        "query": keys if queries > 1 else 0,
        "key": int(keys > 1),
    }
    return {
        "mask": {
            "bytes": {"data": "mask", **strides},
            "words": f"int32[{batch * heads * lines * ceil_div(columns, block) * words}]",
            "flags": f"uint8[{flags}]",
            "batch": heads if batch > 1 else 0,
            "head": int(heads > 1),
        },
    } | blocks


def bias_params(case: Case, c: dict[str, int]) -> dict[str, Any]:
    batch, heads, queries, keys = term_sizes(case, case.bias)
    assert c["kHasBias"] == (batch > 0)
    if batch == 0:
        nothing = {"data": None, "batch": 0, "head": 0, "query": 0, "key": 0}
        return {"bias": nothing, "softcap_bias": 0.0}
    assert (c["kBiasQueries"], c["kBiasKeys"]) == (queries > 1, keys > 1)
    assert c["kBiasFloat32"] == (case.bias_dtype == "float32")
    strides = {
        "batch": heads * queries * keys if batch > 1 else 0,
        "head": queries * keys if heads > 1 else 0,
        "query": keys if queries > 1 else 0,
        "key": int(keys > 1),
    }
    cap = case.softcap
    return {
        "bias": {"data": "bias", **strides},
        "softcap_bias": np.float32(1 / cap) if cap else 0.0,
        "scale_log2": np.float32((cap or 1.0) / math.log(2)),
    }


def check_clear(case: Case, before: list[Launch], main: Launch, c: dict[str, int]) -> None:
    """Checks that dbias is zeroed if the main kernel stores it but for some blocks."""
    terms = ("QueryLengths", "KeyValueLengths", "Segments", "Positions", "Mask")
    hides = c["kWindowLeft"] or c["kWindowRight"] or any(c[f"kHas{term}"] for term in terms)
    if not (c["kStoresDbias"] and hides):
        assert before == []
        return
    words = math.prod(term_sizes(case, case.bias)) // 2
    zeros = {"target": main.params["dbias"], "value": 0, "words": words}
    assert before == [Launch("fill", params=zeros)]


def without_bias(call: Call) -> list[Launch]:
    """The launches but for those that sum the gradient of a bias, of the main kernel the first."""
    kept: list[Launch] = []
    for launch in call.launches:
        again = kept and launch.entry == kept[-1].entry
        if not (again or launch.entry in ("flash_backward_bias", "flash_backward_bias_sum")):
            kept.append(launch)
    return kept


def check_dbias(case: Case, call: Call, c: dict[str, int]) -> dict[str, Any]:
    """Checks the launches that sum the gradient of the bias; returns their parameters."""
    after = call.launches[[x.entry for x in call.launches].index("flash_backward_finish") + 1 :]
    batch, heads, queries, keys = term_sizes(case, case.bias)
    elements = batch * heads * queries * keys
    found: dict[str, Any] = {"first_kv_head": 0, "launched_kv_heads": 0}
    if elements == 0:
        assert after == []
        names = ("bias_elements", "bias_batches", "bias_heads", "dbias_parts")
        return found | dict.fromkeys(names, 0) | {"dbias": None, "dbias_sum": None}
    found |= {
        "dbias": "dbias",
        "bias_elements": elements,
        "bias_batches": batch,
        "bias_heads": heads,
    }
    if c["kDbiasByHeads"]:
        assert after == []
        return found | {"dbias_parts": 0} | check_sums_of_batch(case, call, c)
    if c["kStoresDbias"]:  # the main kernel does
        assert after == []
        assert not case.dropout
        assert c["kDbiasByRows"] == (", added" in case.name)
        rows = batch if c["kDbiasByRows"] else math.prod(case.batch)
        assert elements == rows * case.N * case.T * case.S
        return found | {"dbias_parts": 0, "dbias_sum": None}
    main, *rest = after
    parts = main.params["dbias_parts"]
    blocks = batch * heads
    blocks *= ceil_div(queries, c["kBlockQ"]) * ceil_div(keys, c["kBlockKV"])
    pairs = ceil_div(case.T, c["kBlockQ"]) * ceil_div(case.S, c["kBlockKV"])
    assert 1 <= parts <= math.prod(case.batch) * case.N * pairs // blocks
    assert (main.entry, main.grid) == ("flash_backward_bias", [blocks * parts, 1, 1])
    assert main.block == [2 * c["kBlockKV"], 1, 1]
    boxes = ceil_div(case.H, 64) + ceil_div(case.value_dim, 64)
    tiles = 128 * boxes * (c["kBlockQ"] + c["kBlockKV"])
    hopper = "kSumStages" in c  # where barriers lie behind the tiles
    assert main.shared == (c["kSumStages"] * tiles + 1024 if hopper else tiles)
    if parts > 1:
        (last,) = rest
        assert (last.entry, last.block, last.shared) == ("flash_backward_bias_sum", [256, 1, 1], 0)
        assert last.grid == [ceil_div(elements, 256), 1, 1]
    else:
        assert rest == []
    sums = f"float32[{parts * elements}]" if parts > 1 else None
    return found | {"dbias_sum": sums, "dbias_parts": parts}


def check_sums_of_batch(case: Case, call: Call, c: dict[str, int]) -> dict[str, Any]:
    """Checks that dS of some heads at a time is stored and summed; returns parameters."""
    batch, group = math.prod(case.batch), case.N // case.kv_heads
    assert batch > 1
    names = [launch.entry for launch in call.launches]
    first, end = names.index("flash_backward_prepare") + 1, names.index("flash_backward_finish")
    launches = call.launches[first:end]
    taken = most = 0
    for main, sums in zip(launches[::2], launches[1::2], strict=True):
        assert main.entry in ("flash_backward", "flash_backward_sm80")
        assert sums.entry == "flash_backward_bias"
        assert sums.params == main.params
        assert main.params["first_kv_head"] == taken
        heads = main.params["launched_kv_heads"]
        blocks = group * heads * ceil_div(case.T, c["kBlockQ"]) * ceil_div(case.S, 64)
        assert (sums.grid, sums.block) == ([blocks, 1, 1], [2 * c["kBlockKV"], 1, 1])
        assert sums.shared == 0
        taken, most = taken + heads, max(most, heads)
    assert taken == case.kv_heads
    assert len(launches) == (4 if "two launches" in case.name else 2)
    pairs = batch * group * case.T * case.S
    assert most * pairs * 2 <= max(64 << 20, case.N * case.T * case.S * 2)
    return {"launched_kv_heads": most, "dbias_sum": f"float32[{most * pairs // 2}]"}


def tensor_map(case: Case, c: dict[str, int], name: str, box_rows: int, box_heads: int = 1) -> Any:
    """The map of a dense array [B, rows, heads, dim]: 16-bit elements, 64 columns a box."""
    if not c["kTmaLoads"]:
        return None
    heads, rows = (case.N, case.T) if name in ("query", "dout") else (case.kv_heads, case.S)
    dim = case.value_dim if name in ("value", "dvalue", "dout") else case.H
    return {
        "address": name,
        "dims": [dim, heads, rows, math.prod(case.batch)],
        "strides": [2 * dim, 2 * dim * heads, 2 * dim * heads * rows],
        "box": [64, box_heads, box_rows, 1],
        "type": 9 if case.dtype == "bfloat16" else 6,  # CU_TENSOR_MAP_DATA_TYPE_...
        "swizzle": 3,  # CU_TENSOR_MAP_SWIZZLE_128B
    }


def bias_bytes(case: Case) -> int:
    return 0 if case.bias is None else 4 if case.bias_dtype == "float32" else 2


def bias_map(case: Case, c: dict[str, int], box_queries: int) -> Any:
    """The map of a bias of all queries and keys in rows of whole 16 bytes."""
    batch, heads, queries, keys = term_sizes(case, case.bias)
    size = bias_bytes(case)
    plane = min(queries, keys) > 1 and keys * size % 16 == 0
    # The backward kernel of wide heads has no room; here all others do.
    wide = max(case.H, case.value_dim) > 128 and "kScoreStages" in c
    assert c["kBiasTiles"] == (plane and c["kTmaLoads"] and not wide)
    if not c["kBiasTiles"]:
        return None
    return {
        "address": "bias",
        "dims": [keys, queries, heads, batch],
        "strides": [size * keys, size * keys * queries, size * keys * queries * heads],
        "box": [128 // size, box_queries, 1, 1],
        "type": {"float32": 7, "bfloat16": 9, "float16": 6}[case.bias_dtype or case.dtype],
        "swizzle": 3,
    }


# ---- which buffer a pointer is -----------------------------------------------------------------

RESULTS = {"forward": ["out", "lse"], "backward": ["dquery", "dkey", "dvalue"]}
WORKSPACE_TYPES = {11: "float32", 4: "int32", 6: "uint8"}  # XLA_FFI_DataType_F32, S32, U8


def names_of_buffers(case: Case, recording: Recording) -> list[list[str | None]]:
    """Names the buffers of both calls: operands by their values, workspaces by type and size."""
    arguments = case.draw()
    arrays = arguments.arrays | {"dout": arguments.dout}
    if arguments.dlse is not None:
        arrays["dlse"] = arguments.dlse
    if case.dropout:
        state = [
            [*dropout_words(), n, b] for b in range(math.prod(case.batch)) for n in range(case.N)
        ]
        arrays["dropout_state"] = np.array(state, np.uint32)
    if case.score == "alibi":
        ids = [[b, n] for b in range(math.prod(case.batch)) for n in range(case.N)]
        arrays["score_ids"] = np.array(ids, np.int32)
    if case.block_mask is not None:
        arrays["block_numbers"] = np.asarray(case.block_mask.numbers)
        arrays["block_bits"] = np.asarray(case.block_mask.bits)
    known = {int(np.frombuffer(x.tobytes(), np.uint8).sum()): name for name, x in arrays.items()}
    assert len(known) == len(arrays)
    names = []
    for call in recording.calls:
        target = call.target.removeprefix("sm80_")
        results = RESULTS[target]
        if target == "backward" and case.bias:
            results = [*results, "dbias"]
        names.append([known[buffer["sum"]] for buffer in call.operands] + results)
        assert len(set(names[-1])) == len(names[-1])
        names[-1] += [name_workspace(buffer) for buffer in call.results[len(results) :]]
        known |= {x["sum"]: n for x, n in zip(call.results, results, strict=False)}
    return names


def name_workspace(buffer: dict[str, Any]) -> str | None:
    elements = math.prod(buffer["dims"])
    return f"{WORKSPACE_TYPES[buffer['dtype']]}[{elements}]" if elements else None


def assert_launched_with(call: Call, names: list[str | None], expected: dict[str, Any]) -> None:
    """Compares the parameters of all launches of a call, pointers by the names of buffers."""
    kernels = [launch for launch in call.launches if launch.entry != "fill"]
    own = {"first_kv_head": 0, "launched_kv_heads": 0}  # of each launch: check_sums_of_batch
    assert all(launch.params | own == kernels[0].params | own for launch in kernels)
    assert len({launch.program.split("#include")[0] for launch in kernels}) == 1  # the constants

    def name(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: name(x) for key, x in value.items()}
        if isinstance(value, list):
            return [name(x) for x in value]
        if not isinstance(value, Pointer):
            return value
        index = call.find(value)
        return None if index is None else names[index]

    params = name(kernels[0].params)
    del params["l2_heads"]  # a matter of speed
    assert params == expected
    given = kernels[0].params
    given |= {f"mask_{name}": given["mask"][name] for name in ("words", "flags")}
    given |= {"block_flags": given["block_mask"]["flags"]}
    pointers = [given[name] for name in WORKSPACES[call.target.removeprefix("sm80_")]]
    used = [pointer for pointer in pointers if name(pointer) is not None]
    assert len(set(used)) == len(used)
