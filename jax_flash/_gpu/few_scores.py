"""Owns which passes XLA's own products run in less time than kernels: those of few scores.

A block of a kernel has 64 queries or more of one head, and 128 keys: where a call has a handful,
most of it is empty, while a product of XLA takes a handful of any shape. `takes` has the order in
which is asked, `_RULES` the rules of 16 bits, each with the figures that it stands on: us of
kernels and of products, of an H200 where none is named, rows x queries x keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jax_flash._call import Call
from jax_flash._gpu import carrier, few_queries, short_float32, sm90
from jax_flash._gpu.meaning import Meaning
from jax_flash._gpu.sm90 import folds
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

REASON = "XLA's products of so few scores take less time than kernels: backend='cuda' runs these"

_SCORES = 1 << 24  # 64 MB in float32: what backend "xla" computes at once
_TIMED = ("bias", "mask", "query_lengths", "key_value_lengths")


def takes(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether XLA's products are to run a pass that kernels could run, where none is named.

    First comes what is faster than decoding too, then what decoding is faster at, then the rules.
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
    few = _Few(call.problem, shapes, call, gpu)
    if few.scores > _SCORES:
        return False
    if _one_query_read_once(few):
        return True
    if few_queries.outrun_products(call, shapes, gpu):
        return False
    if call.problem.dtype == "float32":
        return _float32(few)
    return any(rule(few) for rule in _RULES)


@dataclasses.dataclass(frozen=True)
class _Few(Meaning):
    """A pass whose sizes are known, as rules ask it."""

    call: Call
    gpu: GpuSpec

    @property
    def is_backward(self) -> bool:
        return self.call.target == "backward"

    @property
    def units(self) -> int:
        """Heads of all rows: a block of a kernel is of one."""
        return self.shapes.batch * self.shapes.q_heads

    @property
    def scores(self) -> int:
        return self.units * self.shapes.q_len * self.shapes.kv_len

    @property
    def multiplications(self) -> int:
        return self.scores * self.widest

    @property
    def shortest(self) -> int:
        return min(self.shapes.q_len, self.shapes.kv_len)

    @property
    def longest(self) -> int:
        return max(self.shapes.q_len, self.shapes.kv_len)

    @property
    def have_own_keys(self) -> bool:
        return self.shapes.q_heads == self.shapes.kv_heads

    @property
    def copies_queries(self) -> bool:
        """Forward alone XLA copies queries of heads that share keys.

        3 x 256 x 2, 12/3 heads of 80 8 to 16.
        """
        return not (self.have_own_keys or self.is_backward) and self.shapes.q_len > 64

    @property
    def is_sparing(self) -> bool:
        """No softcap, function or term beside a bias, a mask and lengths."""
        return self.has_only(*_TIMED) and not (self.is_capped or self.is_mapped)

    @property
    def is_windowed(self) -> bool:
        """Causality too."""
        return self.has_left or self.has_right

    @property
    def is_plain(self) -> bool:
        """Nothing, and no window either."""
        return not (self.problem.terms or self.is_capped or self.is_mapped or self.is_windowed)

    @property
    def adds_bias_of_rows(self) -> bool:
        """Gradients of a bias that rows share are asked for, in bfloat16."""
        bias = self.shapes.bias
        shared = bias is not None and bias.batch == 1 and "dbias" in self.call.results
        return self.is_backward and shared and self.problem.dtype == "bfloat16"

    @property
    def loads_by_warps(self) -> bool:
        """Rows are no multiples of 16 bytes."""
        return not sm90.tma_loads_of(self.shapes)

    @property
    def kernels_read_once(self) -> bool:
        """Hopper's kernels read keys once for all heads that share them."""
        hopper = self.gpu.arch in sm90.Sm90.architectures
        return hopper and folds.fill_together(self.call, self.shapes, self.gpu)


# ---- before decoding -----------------------------------------------------------------------------


def _one_query_read_once(few: _Few) -> bool:
    """16 bits, forward alone, one query: XLA reads its keys where they lie.

    One head of queries for each of keys, up to 128 keys: 3000 x 40, 8 of 128 353 to 154; 2000 x 56,
    3 of 192 125 to 78; 700 x 96, 16 of 64 125 to 79; 200 x 128, 8 of 128 by decoding 34 to 32; but
    256 x 196, 12 of 64 48 to 50. Two, up to 99: 900 x 80, 16/8 of 64 127 to 70. Two queries,
    900 x 2 x 60, 4 of 128 65 to 161.
    """
    if few.is_backward or few.problem.dtype == "float32" or not few.is_plain:
        return False
    most = {1: 128, 2: 99}.get(few_queries.queries_of_key(few.shapes), 0)
    return few.shapes.q_len == 1 and few.shapes.kv_len <= most


# ---- float32 -------------------------------------------------------------------------------------


def _float32(few: _Few) -> bool:
    """float32, whose kernels are several launches: few scores, or few positions, 4 to 32.

    H100: 64 positions take as long either way, 4 a seventh (with gradients 1743 to 262). Not where
    kernels read keys once for heads that share them: 64 x 8 x 1024, 20/2 heads of 128 (2^23.3
    scores) 129 to 207, with gradients 324 to 653, but 16 x 16 x 2048, 8/1 of 64 (2^22) 101 to 54
    and 200 to 166.
    """
    if short_float32.takes(few.call, few.shapes, few.gpu):
        return False
    if _float32_copies(few) or _float32_uneven(few):
        return False
    if few.scores <= 1 << 19:
        return True
    return few.shortest <= 32 and not (few.scores >= 1 << 23 and few.kernels_read_once)


def _float32_copies(few: _Few) -> bool:
    """Gradients of short rows run on copies, which their forward pass shares, in less time.

    Rows that fill half a block, folded, of many elements of queries and of keys, by copies and by
    products with forward: 64 x 25, 24 heads of 96 139 to 218; 100 x 10, 16 of 128 103 to 157;
    465 x 8, 4 of 224 138 to 187; 32 x 48, 8 of 128 (2^20.6) 77 to 63; 308 x 4, 64 of 80 268 to 159.
    Beside causality or a window, where XLA makes operands finite, fewer: 226 x 23, 4 of 176 143 to
    203; 110 x 20, 4 of 176 94 to 106; 113 x 22, 4 of 200 105 to 130; 58 x 23, 8 of 160 92 to 115.
    """
    shapes = few.shapes
    if not few.is_backward or few.gpu.arch not in sm90.Sm90.architectures:
        return False
    if not carrier.takes(few.problem) or few.shortest <= 4 or few.is_mapped:
        return False
    least_elements, least_filled = (1_500_000, 20) if few.is_windowed else (1_800_000, 64)
    rows = shapes.batch * min(shapes.q_len * shapes.q_heads, shapes.kv_len * shapes.kv_heads)
    if rows * min(shapes.head_dim, shapes.value_dim) < least_elements:
        return False
    folded = folds.fold_rows(carrier.carried(few.call), shapes, few.gpu)
    return folded * few.longest >= least_filled


def _float32_uneven(few: _Few) -> bool:
    """Gradients of few units run on kernels where rows of long keys begin within 16 bytes.

    By kernels and by products, with forward: 2 x 9 x 3001, 4 heads of 96 82 to 183; 9 x 12 x 1518,
    one of 64 54 to 84; 7 x 20 x 1701, one of 80 60 to 71; 12 x 28 x 1022, one of 128 61 both; 1500
    keys, which 4 divides: 6 x 16, 2 of 64 60 to 64. Up to twice the units, queries, keys and
    columns that were timed.
    """
    shapes = few.shapes
    if not few.is_backward or few.gpu.arch not in sm90.Sm90.architectures or not few.is_plain:
        return False
    if not carrier.takes(few.problem):
        return False
    units = few.have_own_keys and few.units <= 16 and 8 <= shapes.q_len <= 24
    dims = all(x in range(32, 129, 8) for x in (shapes.head_dim, shapes.value_dim))
    return units and dims and 1400 <= shapes.kv_len <= 6000 and shapes.kv_len % 4 > 0


# ---- 16 bits: few multiplications ----------------------------------------------------------------
# XLA makes 1 to 5 kernels forward and 4 to 10 with gradients of so few, which it sums
# (_products.py), 4 to 6 where each head has its own keys; ours are 3 and 6 launches beside copies
# of what they broadcast, and outside of CUDA graphs.


def _one_key(few: _Few) -> bool:
    """Every weight is 1."""
    return few.shapes.kv_len == 1


def _few_keys(few: _Few) -> bool:
    """Up to 4 keys.

    Up to 12 queries, with gradients in brackets: 512 x 4, 12 heads of 64, a mask 15 to 12 (40 to
    26); 12/4 heads 27 to 17 (53 to 31); 128 x 6 x 3, 8 of 128 11 to 7 (32 to 15). More queries, of
    few multiplications: 28 x 512 x 2, one of 112, a mask 11 to 10 (47 to 20); 103 x 12 x 3, 24 of
    128, a mask 58 to 18 (171 to 40); but 512 x 16 x 4 26 to 32, 6 x 1024 x 2, 40 of 96 51 to 98.
    """
    if few.shapes.kv_len > 4 or not few.is_sparing:
        return False
    if few.shapes.q_len <= 12 and few.scores <= 1 << 19:
        return True
    return few.multiplications <= 1 << 22 and not few.copies_queries


def _forward_alone(few: _Few) -> bool:
    """Any lengths up to a block's, forward alone, without a bias: a kernel or two of XLA's.

    2 x 50, one head of 128 6.1 to 3.1; 1 x 128, one of 32, causal 7.0 to 3.1; 1 x 90 x 128, one of
    80 7.1 to 3.6; 2 x 40, 8/2 of 32, a mask 8.2 to 5.2; but 1 x 70, 4 of 40, a bias 8.0 to 10.8.
    Half as much beside causality: 1 x 45, 5 of 96 6.5 to 8.1; 1 x 100, 2 of 48 7.3 to 7.8.
    """
    if few.is_backward or few.has("bias") or not few.is_sparing:
        return False
    return few.longest <= 128 and few.multiplications <= (1 << 19 if few.is_windowed else 1 << 20)


def _few_multiplications(few: _Few) -> bool:
    """Few queries or keys of up to 2^21 multiplications.

    Short rows of heads that share keys, whose units are the emptiest, 3 x 2^20, with gradients in
    brackets: 604 x 4, 4/2 heads of 64 13 to 11 (50 to 22); 1578 x 5, 4/2 of 16 20 to 15 (45 to
    34); but 922 x 5, 4/2 of 40 (2^21.8) 16 to 19 (51 to 45). Half as much where queries or keys are
    33 to 128, a block of a kernel, and neither are few: XLA's columns are long. float16, 1 x 5 x
    92, 24 of 160 (2^20.8) 8 to 11 (21 to 27); 11 x 12 x 42, 6/3 of 48 (2^20.6) 6 to 7 (20 to 41).
    Other dtypes and terms than causality were not timed.
    """
    most = 1 << 21 if few.have_own_keys or few.longest > 8 else 3 << 20
    if few.shortest > 4 and 32 < few.longest <= 128:
        most = 1 << 20
    short = few.shortest <= (32 if few.have_own_keys else 16)
    return short and few.multiplications <= most and not few.copies_queries


# ---- 16 bits: rows that warps load ---------------------------------------------------------------


def _keys_by_warps(few: _Few) -> bool:
    """Up to 16 keys of each head.

    H100: 82 x 2048 x 11, one head of 177, a bias and lengths of keys 324 to 211, with gradients
    1006 to 453.
    """
    own = few.have_own_keys and few.loads_by_warps and few.has_only(*_TIMED)
    return own and few.shapes.kv_len <= 16 and few.scores <= 1 << 21


def _words_of_rows(few: _Few) -> bool:
    """Rows of any term but functions, longer to load than what they compute takes.

    In words of 2 bytes, few scores and keys that XLA copies: 63 x 6, 40/2 heads of 183 128 to 26,
    with gradients 360 to 69; 1 x 512, one of 169 50 to 14, 158 to 35; but 3 x 8 x 178, 32 of 215 28
    to 31, 82 to 153. In words of 4 by keys that are few: 2 x 32, 3/1 of 170 7.7 to 4.5, 36 to 22;
    90 x 5 x 64, 3/1 of 42 18 to 7, 42 to 24. In any words many units of 8 x 8 scores: 256 x 8, 3/1
    of 100 24 to 14, 56 to 42; 16 x 16 take 1.2 times as long.
    """
    shapes, scores = few.shapes, few.scores
    if not few.loads_by_warps or few.is_mapped:
        return False
    if not few.is_backward and sm90.early_tiles(few.problem, shapes) is not None:
        return False
    keys = shapes.batch * shapes.kv_heads * shapes.kv_len * few.widest
    words = math.gcd(shapes.head_dim, shapes.value_dim, 4)
    if words == 1 and scores <= 1 << 18 and keys <= 1 << 21:
        return True
    if words == 2 and scores <= (1 << 17 if keys <= 1 << 18 else 1 << 15):
        return True
    return few.units >= 512 and scores <= min(few.units * 8 * 8, 1 << 18)


def _gradients_by_warps(few: _Few) -> bool:
    """Gradients of short rows of heads that share keys, by words of 2 or 4 bytes.

    304 x 17, 20/4 heads of 198 585 to 443; 372 x 21, 15/3 of 199 652 to 581; 188 x 28, 25/5 of 194
    586 to 542; but 438 x 29 1458 to 1802.
    """
    if not few.is_backward or few.have_own_keys or few.is_mapped or not few.has_only(*_TIMED):
        return False
    narrow = math.gcd(few.shapes.head_dim, few.shapes.value_dim, 4) < 4
    return narrow and few.longest <= 28 and few.scores <= 1 << 22


# ---- 16 bits: units that are mostly empty --------------------------------------------------------


def _one_query(few: _Few) -> bool:
    """One query of few keys, whatever heads share; 2^16 scores were measured.

    H100: 1000 x 8, 8/2 heads of 128 53 to 41, with gradients 108 to 87.
    """
    return few.shapes.q_len == 1 and few.shapes.kv_len <= 16 and few.scores <= 1 << 16


def _beside_bias_or_dropout(few: _Few) -> bool:
    """Rows that are no documents of longer ones: each of a head is a unit, a block of 128 queries.

    H100, with gradients: 1000 x 2, 40/8 heads of 64, a bias 2235 to 319; 2000 x 12, 12 of 64,
    dropout 1772 to 818. 16 x 16 scores take as long either way, 2048 units -10 to 14 %, 512 wide
    ones 3. A mask's have kernels of their own, which are as fast; sinks and functions were not
    timed.
    """
    if not few.has("bias", "dropout_state") or not few.has_only(*_TIMED, "dropout_state"):
        return False
    if few.is_capped or few.is_mapped:
        return False
    many = few.units >= (1024 if few.widest > 128 else 4096)
    return many and few.scores <= min(few.units * 14 * 14, 1 << 22)


# ---- 16 bits: few units that walk long keys ------------------------------------------------------


def _wide_walk(few: _Few) -> bool:
    """Heads wider than 128, up to 16 queries: one block of keys behind the other.

    1 x 2 x 512, 20/1 heads of 232 16 to 8, with gradients 75 to 24; 1 x 9 x 1024, 2 of 160 18 to
    12, 33 to 28, in float16 17 to 9, 32 to 37.
    """
    shapes = few.shapes
    walk = few.units <= 32 and shapes.q_len <= 16 and shapes.kv_len >= 512
    return walk and few.widest > 128 and few.multiplications <= 1 << 23


def _walk_beside_terms(few: _Few) -> bool:
    """Units of one kv head that are no round, beside a bias or a mask.

    17 x 32 x 3035, 2/1 heads of 128, a bias 65 to 59; 11 x 34 x 3120, 2/1 of 136 64 to 37; 10 x 99
    x 614, one of 168, a mask 21 to 19; but 25 x 31 x 3184, 2/1 of 160 66 to 75. A block of keys
    takes 0.7 us where heads are narrow and TMA loads the bias.
    """
    shapes = few.shapes
    if few.problem.dtype != "bfloat16" or not few.has("bias", "mask") or not few.is_sparing:
        return False
    if shapes.kv_heads != 1 or few.units * -(-shapes.q_len // 128) > 132:
        return False
    slow = few.widest > 128 or (shapes.bias is not None and shapes.kv_len % 8 > 0)
    rows = shapes.batch * shapes.kv_len / 1e6
    products = rows * (shapes.head_dim + shapes.value_dim + 7.5 * shapes.q_heads * shapes.q_len)
    walk = 7 + (1.3 if slow else 0.7) * -(-shapes.kv_len // 64)
    # Units of the backward pass are of keys, so that many run at once: what is long is the walk of
    # the forward pass beside it. 32 queries, 4096 keys, one head of 160, a mask: 97 us of 115.
    return walk > (12 + products) * (3 if few.is_backward else 1)


# ---- 16 bits: kernels that read again ------------------------------------------------------------


def _bias_of_rows(few: _Few) -> bool:
    """Gradients of a bias that rows share, for which dS is computed again, row behind row.

    Up to 4 queries of wide heads: 27 x 4 x 1024, 12/4 heads of 248 587 to 376; 24 x 3 x 1536, 21/7
    of 256 1205 to 737. Many short rows of one that heads share too: 130 x 16, 4 of 96, causal 68 to
    51; 220 x 8, 12 of 64 141 to 93; 400 x 10, 2 of 80 86 to 50; 200 x 10, 8 of 64 119 to 111. XLA's
    products of float16 take longer than those of bfloat16 where it does not tune them.
    """
    shapes, bias = few.shapes, few.shapes.bias
    if bias is None or not few.adds_bias_of_rows:
        return False
    if few.widest > 128 and shapes.q_len <= 4 and shapes.batch > 1:
        return True
    if few.is_mapped or not few.has_only(*_TIMED):
        return False
    return bias.heads == 1 and few.longest <= 16 and shapes.batch >= 120


def _bias_of_one_head(few: _Few) -> bool:
    """The same of one or two wide heads that share their keys.

    200 x 24, 2/1 heads of 224 90 to 59; 180 x 24, one of 192 53 to 41; 150 x 20, 2/1 of 160 63 to
    53; but 160 x 30, 2/1 of 256 86 to 92; 130 x 20, 2 of 160 53 to 62.
    """
    shapes = few.shapes
    if not few.adds_bias_of_rows or few.is_mapped or not few.has_only(*_TIMED):
        return False
    wide = shapes.kv_heads == 1 and shapes.q_heads <= 2 and few.widest > 128
    rows = 150 <= shapes.batch <= 400 and few.shortest >= 10 and few.longest <= 24
    return wide and rows and not few.is_windowed


def _keys_of_one_head(few: _Few) -> bool:
    """Up to 16 queries of 4 heads or more that share a row's keys: 0.3 to 0.8 of the time (H100).

    Up to 32 keys two heads too: 1015 x 10, 3/1 heads of 256 201 to 68. XLA copies keys and
    values of several heads to where a head's are in a row. Units of 128 keys are two rounds of an
    H100: fewer launches take less below. Not where half of an H100 reads keys once for all heads:
    64 rows 111 us for 573 of products that are not tuned.
    """
    shapes = few.shapes
    if shapes.kv_heads != 1 or (shapes.batch >= 64 and few.kernels_read_once):
        return False
    enough = shapes.q_heads >= (4 if shapes.kv_len > 32 else 2)
    return enough and shapes.q_len <= 16 and few.units * -(-shapes.kv_len // 128) >= 264


_RULES: tuple[Callable[[_Few], bool], ...] = (
    _one_key,
    _few_keys,
    _forward_alone,
    _few_multiplications,
    _keys_by_warps,
    _words_of_rows,
    _gradients_by_warps,
    _one_query,
    _beside_bias_or_dropout,
    _wide_walk,
    _walk_beside_terms,
    _bias_of_rows,
    _bias_of_one_head,
    _keys_of_one_head,
)
