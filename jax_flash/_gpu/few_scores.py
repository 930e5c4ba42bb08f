"""Owns which passes XLA's own products run in less time than kernels: those of few scores.

A block of a kernel has 64 queries or more of one head, and 128 keys: where a call has a handful,
most of it is empty, while a product of XLA takes a handful of any shape.
"""

from __future__ import annotations

import math

from jax_flash._call import Call
from jax_flash._gpu import carrier, few_queries, short_float32, sm90
from jax_flash._gpu.sm90 import folds
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

REASON = "XLA's products of so few scores take less time than kernels: backend='cuda' runs these"

_SCORES = 1 << 24  # 64 MB in float32: what backend "xla" computes at once
# float32: 64 positions take as long either way, 4 a seventh; so do few scores of any lengths, since
# kernels of float32 are several launches.
_FLOAT32_LENGTH, _FLOAT32_SCORES = 32, 1 << 19
# Heads that share keys, which kernels then read once: H200, 64 x 8 x 1024, 20/2 heads of 128
# (2^23.3 scores) 207 to 129 us, with gradients 653 to 324; 16 x 16 x 2048, 8/1 of 64 (2^22) 54 and
# 166 on XLA, 101 and 200 by kernels.
_FLOAT32_TOGETHER = 1 << 23
# Gradients beside long keys that 4 does not divide, H200, XLA and kernels with forward: 2 x 9 x
# 3001, 4 heads of 96 183 to 82 us; 9 x 12 x 1518, one of 64 84 to 54; 7 x 20 x 1701, one of 80 71
# to 60; 12 x 28 x 1022, one of 128 61 both; 1500 keys, which 4 divides: 6 x 16, 2 of 64 64 to 60.
# Up to twice the units, queries, keys and columns that were timed.
_UNEVEN_KEYS, _UNEVEN_QUERIES, _UNEVEN_DIMS = range(1400, 6001), range(8, 25), range(32, 129, 8)
_UNEVEN_UNITS = 16
# Gradients of rows that fill half a block, folded, from so many elements of queries and of keys on:
# H200, with forward: 64 x 25, 24 heads of 96 218 to 139; 100 x 10, 16 of 128 157 to 103; 465 x 8, 4
# of 224 187 to 138; 32 x 48, 8 of 128 (2^20.6) 63 to 77; 308 x 4, 64 of 80 159 to 268.
_COPIED_ELEMENTS, _COPIED_LENGTH, _COPIED_LEAST = 1_800_000, 64, 4
# Beside causality or a window, where XLA makes operands finite: 226 x 23, 4 of 176 203 to 143; 110
# x 20, 4 of 176 106 to 94; 113 x 22, 4 of 200 130 to 105; 58 x 23, 8 of 160 115 to 92.
_MARKED_ELEMENTS, _MARKED_LENGTH = 1_500_000, 20
_SHARED_QUERIES, _GROUP = 16, 4  # of heads that share a row's keys: 0.3 to 0.8 of the kernels' time
_SHARED_KEYS = 32  # so few, fewer heads too: H200, 1015 x 10, 3/1 heads of 256 201 to 68 us
# 16 bits: XLA makes 1 to 5 kernels forward and 4 to 10 with gradients of so few multiplications,
# which it sums (_products.py), 4 to 6 where each head has its own keys; ours are 3 and 6 launches
# beside copies of what they broadcast, and outside of CUDA graphs.
_LITTLE_LENGTH, _LITTLE_OWN, _LITTLE = 16, 32, 1 << 21
# Half as much where queries or keys are 33 to 128, a block of a kernel, and neither are few: XLA's
# columns are long. float16, H200: 1 x 5 x 92, 24 heads of 160 (2^20.8) 11 us for 8 by kernels, with
# gradients 27 for 21; 11 x 12 x 42, 6/3 of 48 (2^20.6) 7 for 6, 41 for 20. Other dtypes and terms
# than causality were not timed.
_LITTLE_LONG, _BLOCK = 1 << 20, 128
# So few at any lengths up to a block's, forward alone, without a bias: XLA makes a kernel or two.
# H200: 2 x 50, one head of 128 6.1 to 3.1 us; 1 x 128, one of 32, causal 7.0 to 3.1; 1 x 90 x 128,
# one of 80 7.1 to 3.6; 2 x 40, 8/2 of 32, a mask 8.2 to 5.2. 1 x 70, 4 of 40, a bias 8.0 to 10.8.
# Half as much beside causality: 1 x 45, 5 of 96 6.5 to 8.1; 1 x 100, 2 of 48 7.3 to 7.8.
# Rows of heads that share keys, whose units are the emptiest, H200: 604 x 4, 4/2 heads of 64 13 to
# 11 us, with gradients 50 to 22, 1578 x 5, 4/2 of 16 20 to 15, 45 to 34; 922 x 5, 4/2 of 40, of
# 2^21.8, 16 to 19, 51 to 45. Forward alone XLA copies queries of such heads: 3 x 256 and 2 keys,
# 12/3 of 80 take 8 us by kernels, 16 by products.
_SHORT, _LITTLE_SHORT, _COPIED_QUERIES = 8, 3 << 20, 64
# 16 bits, a few queries too: H200, us and with gradients, 512 x 4, 12 heads of 64, a mask 15 to 12,
# 40 to 26; 12/4 heads 27 to 17, 53 to 31; 128 x 6 and 3 keys, 8 of 128 11 to 7, 32 to 15. Kernels
# take less for more queries, 512 x 16 and 4 keys 26 us for 32, 6 x 1024 and 2, 40 of 96 51 for 98,
# but of few multiplications: 28 x 512 and 2, one of 112, a mask 11 to 10, 47 to 20. 103 x 12 and 3,
# 24 of 128, a mask 58 to 18, 171 to 40.
_FEW_KEYS, _FEW_QUERIES, _FEW_KEYS_SCORES, _FEW_KEYS_LITTLE = 4, 12, 1 << 19, 1 << 22
# 16 bits, rows that are no multiples of 16 bytes, which warps load: 82 x 2048 x 11 scores, a head
# of 177, a bias and lengths of keys take 211 us for 324 forward, 453 for 1006 with gradients.
_LOADED_KEYS, _LOADED_SCORES = 16, 1 << 21
_LOADED_TERMS = {"bias", "mask", "query_lengths", "key_value_lengths"}
# 16 bits, rows in words of 2 or 4 bytes, which warps load, of any term but functions. H200, us
# forward and with gradients: 63 x 6, 40/2 heads of 183 128 to 26, 360 to 69; 1 x 512, one head of
# 169 50 to 14, 158 to 35 (both odd: words of 2 bytes); 2 x 32, 3/1 of 170 7.7 to 4.5, 36 to 22.
# XLA's copies of more keys take longer: 3 x 8 x 178, 32 of 215 28 to 31, 82 to 153. Other words
# by keys that are few: 90 x 5 x 64, 3/1 of 42 18 to 7, 42 to 24.
_ODD_SCORES, _EVEN_SCORES = 1 << 18, 1 << 15
_ODD_KEYS, _EVEN_FEW, _EVEN_KEYS = 1 << 21, 1 << 17, 1 << 18
# Rows of heads that share keys, loaded by warps, with gradients, H200: 304 x 17, 20/4 of 198 585 to
# 443 us, 372 x 21, 15/3 of 199 652 to 581, 188 x 28, 25/5 of 194 586 to 542, 438 x 29 1458 to 1802.
_LOADED_LENGTH, _LOADED_MOST = 28, 1 << 22
# Gradients of a bias that rows share, of wide heads: kernels read keys again, a row behind the
# other. H200: 27 x 4 x 1024, 12/4 of 248 587 to 376 us, 24 x 3 x 1536, 21/7 of 256 1205 to 737.
_SHARED_BIAS_QUERIES = 4
# A bias that heads share too: 130 x 16, 4 of 96, causal 68 to 51 us, 220 x 8, 12 of 64 141 to 93,
# 400 x 10, 2 of 80 86 to 50, 200 x 10, 8 of 64 119 to 111.
_SHARED_BIAS_ROWS, _SHARED_BIAS_LENGTH = 120, 16
# One of wide heads that share their keys: 200 x 24, 2/1 of 224 90 to 59, 180 x 24, one of 192 53 to
# 41, 150 x 20, 2/1 of 160 63 to 53; 160 x 30, 2/1 of 256 86 to 92, 130 x 20, 2 of 160 53 to 62.
_ONE_BIAS_ROWS, _ONE_BIAS_LENGTHS, _ONE_BIAS_HEADS = range(150, 401), range(10, 25), 2
# 16 bits, such rows of any words, 8 x 8 scores a head and row: H200, 256 x 8, 3/1 heads of 100 24
# to 14 us, with gradients 56 to 42. 16 x 16 scores take 1.2 times as long.
_LOADED_UNIT, _LOADED_UNITS = 8 * 8, 512
# 16 bits, heads wider than 128, one unit a head that walks long keys: H200, 1 x 2 x 512, 20/1 heads
# of 232 16 to 8 us, with gradients 75 to 24; 1 x 9 x 1024, 2 of 160 18 to 12, 33 to 28 (in float16
# 17 to 9, 32 to 37).
_WALK_QUERIES, _WALK_KEYS, _WALK_HEADS, _WALK = 16, 512, 32, 1 << 23
# 16 bits, one query of few keys, whatever heads share: H100, 1000 rows of 8 keys, 8/2 heads of 128
# 53 to 41 us, with gradients 108 to 87; 2^16 scores were measured.
_ONE_QUERY_KEYS, _ONE_QUERY_SCORES = 16, 1 << 16
# 16 bits, one query, forward alone, whose keys XLA reads where they lie: most keys by how many
# heads share them. H200, us, kernels and products: 3000 x 40, 8 of 128 353 to 154; 2000 x 56, 3 of
# 192 125 to 78; 700 x 96, 16 of 64 125 to 79; 900 x 80, 16/8 of 64 127 to 70; 200 x 128, 8 of 128
# by decoding 34 to 32; 256 x 196, 12 of 64 48 to 50; two queries, 900 x 2 x 60, 4 of 128 65 to 161.
# Terms were not timed.
_READ_ONCE = {1: 128, 2: 99}
# 16 bits beside a bias or dropout, whose rows are no documents of longer ones: each row of a head
# is a unit, a block of 128 queries. H100, with gradients: 1000 x 2, 40/8 heads of 64, a bias 2235
# to 319 us; 2000 x 12, 12 of 64, dropout 1772 to 818. 16 x 16 scores take as long either way.
_EMPTY_SCORES, _EMPTY_MOST = 14 * 14, 1 << 22
_EMPTY_UNITS, _EMPTY_WIDE_UNITS = 4096, 1024  # least; 2048 are -10 to 14 %, 512 wide ones 3
_ROWS = 64  # whose keys half of an H100 reads: 111 us for 573 of products that are not tuned
_UNITS = 264  # heads x blocks of 128 keys: two rounds of an H100; fewer launches take less below


def takes(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether XLA's products are to run a pass that kernels could run, where none is named.

    Figures are those of the GPU that each names, else of an H100 (cuda/decisions.md).
    """
    if call.target not in ("forward", "backward") or call.backend is not None:
        return False
    if call.next is not None:  # both passes of a program share products
        call = call.next
    sizes = (shapes.batch, shapes.q_heads, shapes.q_len, shapes.kv_len)
    if "indices" in call.operands:  # whose products XLA makes of what it gathers first
        return False
    if call.problem.as_written or not all(isinstance(size, int) for size in sizes):
        return False
    batch, heads, queries, keys = sizes
    scores = batch * heads * queries * keys
    if scores > _SCORES:
        return False
    if _reads_once(call, shapes):
        return True
    if few_queries.outrun_products(call, shapes, gpu):
        return False
    if call.problem.dtype == "float32":
        return _takes_float32(call, shapes, gpu, scores)
    if keys == 1:
        return True
    widest = max(shapes.head_dim, shapes.value_dim)
    own, backward = heads == shapes.kv_heads, call.target == "backward"
    little = scores * widest <= (_LITTLE if own or max(queries, keys) > _SHORT else _LITTLE_SHORT)
    if not own and not backward and queries > _COPIED_QUERIES:
        little = False
    if min(queries, keys) > _FEW_KEYS and _LITTLE_OWN < max(queries, keys) <= _BLOCK:
        little = little and scores * widest <= _LITTLE_LONG
    simple = _LOADED_TERMS.issuperset(call.problem.terms)
    simple &= call.problem.softcap is None and call.problem.score is None
    if simple and keys <= _FEW_KEYS:
        if queries <= _FEW_QUERIES and scores <= _FEW_KEYS_SCORES:
            return True
        if scores * widest <= _FEW_KEYS_LITTLE and (own or backward or queries <= _COPIED_QUERIES):
            return True
    alone = simple and not backward and "bias" not in call.problem.terms
    most = _LITTLE_LONG if call.problem.window == (None, None) else _LITTLE_LONG // 2
    if alone and max(queries, keys) <= _BLOCK and scores * widest <= most:
        return True
    loaded = own and not sm90.tma_loads_of(shapes) and _LOADED_TERMS.issuperset(call.problem.terms)
    if loaded and keys <= _LOADED_KEYS and scores <= _LOADED_SCORES:
        return True
    if queries == 1 and keys <= _ONE_QUERY_KEYS and scores <= _ONE_QUERY_SCORES:
        return True
    if _are_empty(call, shapes, scores) or _load_slowly(call, shapes, scores):
        return True
    if _walk_long(shapes, scores) or _walk_beside_terms(call, shapes):
        return True
    if backward and (_add_slowly(call, shapes) or _are_loaded(call, shapes, scores)):
        return True
    if little and min(queries, keys) <= (_LITTLE_OWN if own else _LITTLE_LENGTH):
        return True
    # XLA copies keys and values of several heads to where a head's are in a row.
    if shapes.kv_heads != 1:
        return False
    if batch >= _ROWS and _read_once(call, shapes, gpu):
        return False
    units = batch * heads * -(-keys // 128)
    enough = heads >= (_GROUP if keys > _SHARED_KEYS else 2)
    return queries <= _SHARED_QUERIES and enough and units >= _UNITS


def _reads_once(call: Call, shapes: Shapes) -> bool:
    """Tells whether a forward pass of one query reads few keys, in 16 bits."""
    problem = call.problem
    if call.target == "backward" or problem.dtype == "float32" or problem.window != (None, None):
        return False
    plain = not problem.terms and problem.softcap is None and problem.score is None
    most = _READ_ONCE.get(few_queries.queries_of_key(shapes), 0)
    return plain and shapes.q_len == 1 and shapes.kv_len <= most


def _read_once(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether kernels read keys once for all heads that share them, as Hopper's do."""
    return gpu.arch in sm90.Sm90.architectures and folds.fill_together(call, shapes, gpu)


def _takes_float32(call: Call, shapes: Shapes, gpu: GpuSpec, scores: int) -> bool:
    if short_float32.takes(call, shapes, gpu) or _copies_pay(call, shapes, gpu):
        return False
    if _are_uneven(call, shapes, gpu):
        return False
    if scores <= _FLOAT32_SCORES:
        return True
    short = min(shapes.q_len, shapes.kv_len) <= _FLOAT32_LENGTH
    return short and not (scores >= _FLOAT32_TOGETHER and _read_once(call, shapes, gpu))


def _are_uneven(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether gradients of few units have long rows of scores that begin within 16 bytes."""
    problem = call.problem
    if call.target != "backward" or gpu.arch not in sm90.Sm90.architectures:
        return False
    plain = not problem.terms and problem.softcap is None and problem.score is None
    plain &= carrier.takes(problem)
    if not plain or problem.window != (None, None) or shapes.q_heads != shapes.kv_heads:
        return False
    few = shapes.q_len in _UNEVEN_QUERIES and shapes.batch * shapes.q_heads <= _UNEVEN_UNITS
    timed = shapes.kv_len in _UNEVEN_KEYS and shapes.head_dim in _UNEVEN_DIMS
    return few and timed and shapes.value_dim in _UNEVEN_DIMS and shapes.kv_len % 4 > 0


def _copies_pay(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether gradients of short rows in float32 run on copies of what XLA would transpose.

    Their forward pass shares these copies.
    """
    following = call.next if call.target == "forward" else call
    if following is None or gpu.arch not in sm90.Sm90.architectures:
        return False
    if not carrier.takes(following.problem):
        return False
    if min(shapes.q_len, shapes.kv_len) <= _COPIED_LEAST or following.problem.score is not None:
        return False
    rows = shapes.batch * min(shapes.q_len * shapes.q_heads, shapes.kv_len * shapes.kv_heads)
    elements, length = _COPIED_ELEMENTS, _COPIED_LENGTH
    if following.problem.window != (None, None):
        elements, length = _MARKED_ELEMENTS, _MARKED_LENGTH
    if rows * min(shapes.head_dim, shapes.value_dim) < elements:
        return False
    carried = carrier.carried(following)
    folded = folds.fold_rows(carried, shapes, gpu)
    return folded * max(shapes.q_len, shapes.kv_len) >= length


def _are_empty(call: Call, shapes: Shapes, scores: int) -> bool:
    """Tells whether units of kernels are many and have few scores each, beside a bias or dropout.

    A mask's have kernels of their own, which are as fast. Sinks and functions were not timed.
    """
    units = shapes.batch * shapes.q_heads
    timed = {*_LOADED_TERMS, "dropout_state"}.issuperset(call.problem.terms)
    alone = {"bias", "dropout_state"}.isdisjoint(call.problem.terms)
    if alone or not timed or call.problem.softcap is not None or call.problem.score is not None:
        return False
    wide = max(shapes.head_dim, shapes.value_dim) > 128
    many = units >= (_EMPTY_WIDE_UNITS if wide else _EMPTY_UNITS)
    return many and scores <= min(units * _EMPTY_SCORES, _EMPTY_MOST)


def _load_slowly(call: Call, shapes: Shapes, scores: int) -> bool:
    """Tells whether warps of the kernels load rows that are longer than what they compute takes."""
    if sm90.tma_loads_of(shapes) or call.problem.score is not None:
        return False
    if call.target == "forward" and sm90.early_tiles(call.problem, shapes) is not None:
        return False
    odd = math.gcd(shapes.head_dim, shapes.value_dim, 4)
    read = shapes.batch * shapes.kv_heads * shapes.kv_len * max(shapes.head_dim, shapes.value_dim)
    if odd == 1 and scores <= _ODD_SCORES and read <= _ODD_KEYS:
        return True
    if odd == 2 and scores <= (_EVEN_FEW if read <= _EVEN_KEYS else _EVEN_SCORES):
        return True
    units = shapes.batch * shapes.q_heads
    return units >= _LOADED_UNITS and scores <= min(units * _LOADED_UNIT, _ODD_SCORES)


def _walk_long(shapes: Shapes, scores: int) -> bool:
    """Tells whether few units of wide heads walk long keys, one block behind the other."""
    widest = max(shapes.head_dim, shapes.value_dim)
    few = shapes.batch * shapes.q_heads <= _WALK_HEADS and shapes.q_len <= _WALK_QUERIES
    return few and shapes.kv_len >= _WALK_KEYS and widest > 128 and scores * widest <= _WALK


def _walk_beside_terms(call: Call, shapes: Shapes) -> bool:
    """Tells whether units that are no round walk long keys of one head beside a bias or a mask.

    us of an H200: 17 x 32 x 3035, 2/1 heads of 128, a bias 65 by kernels, 59 by products; 11 x 34 x
    3120, 2/1 of 136 64 to 37; 25 x 31 x 3184, 2/1 of 160 66 to 75; 10 x 99 x 614, one of 168, a
    mask 21 to 19. A block of keys takes 0.7 us where heads are narrow and TMA loads the bias.
    """
    terms, problem = {*call.problem.terms}, call.problem
    simple = problem.softcap is None and problem.score is None and problem.dtype == "bfloat16"
    if not simple or not {"bias", "mask"} & terms or not terms <= _LOADED_TERMS:
        return False
    if shapes.kv_heads != 1:
        return False
    if shapes.batch * shapes.q_heads * -(-shapes.q_len // 128) > _UNITS // 2:
        return False
    widest = max(shapes.head_dim, shapes.value_dim)
    slow = widest > 128 or (shapes.bias is not None and shapes.kv_len % 8 > 0)
    rows = shapes.batch * shapes.kv_len / 1e6
    products = rows * (shapes.head_dim + shapes.value_dim + 7.5 * shapes.q_heads * shapes.q_len)
    walk = 7 + (1.3 if slow else 0.7) * -(-shapes.kv_len // 64)
    # Units of the backward pass are of keys, so that many run at once: what is long is the walk of
    # the forward pass beside it. 32 queries, 4096 keys, one head of 160, a mask: 97 us of 115.
    return walk > (12 + products) * (1 if call.target == "forward" else 3)


def _are_loaded(call: Call, shapes: Shapes, scores: int) -> bool:
    """Tells whether warps load short rows of heads that share keys, by words of 2 or 4 bytes."""
    if math.gcd(shapes.head_dim, shapes.value_dim, 4) == 4 or shapes.q_heads == shapes.kv_heads:
        return False
    simple = _LOADED_TERMS.issuperset(call.problem.terms) and call.problem.score is None
    short = max(shapes.q_len, shapes.kv_len) <= _LOADED_LENGTH
    return simple and short and scores <= _LOADED_MOST


def _add_slowly(call: Call, shapes: Shapes) -> bool:
    """Tells whether dS of few queries is computed again for a bias that rows share.

    XLA's products of float16 take longer than those of bfloat16 where it does not tune them.
    """
    wide = max(shapes.head_dim, shapes.value_dim) > 128
    shared = "dbias" in call.results and shapes.bias is not None and shapes.bias.batch == 1
    few = shapes.q_len <= _SHARED_BIAS_QUERIES and call.problem.dtype == "bfloat16"
    if wide and shared and few and shapes.batch > 1:
        return True
    short = max(shapes.q_len, shapes.kv_len) <= _SHARED_BIAS_LENGTH
    by_all = shared and shapes.bias is not None and shapes.bias.heads == 1
    simple = _LOADED_TERMS.issuperset(call.problem.terms) and call.problem.score is None
    if not simple or not shared or call.problem.dtype != "bfloat16":
        return False
    one = shapes.kv_heads == 1 and shapes.q_heads <= _ONE_BIAS_HEADS and wide
    one &= shapes.batch in _ONE_BIAS_ROWS and call.problem.window == (None, None)
    if one and shapes.q_len in _ONE_BIAS_LENGTHS and shapes.kv_len in _ONE_BIAS_LENGTHS:
        return True
    return by_all and short and shapes.batch >= _SHARED_BIAS_ROWS
