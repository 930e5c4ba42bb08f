"""What score_mod may not be, and which backend leaves it to another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _backends, flash_attention, scores

from ..small import K, N, close, qkv


def folded(head):
    return jax.random.fold_in(jax.random.key(0), head)


@pytest.mark.parametrize(
    ("options", "kind", "error"),
    [
        ({"score_mod": 3.0}, TypeError, "score_mod is float; expected a function f.score, batch"),
        (
            {"score_mod": scores.alibi},
            TypeError,
            r"takes \(slopes.*expected .*f.score, batch.*; jax_flash.scores.alibi.* returns one",
        ),
        ({"score_mod": lambda s, b, h, i, j: i}, TypeError, "score_mod returns int32 of shape"),
        (
            {"score_mod": lambda s, b, h, i, j: s * jnp.ones(3)},
            TypeError,
            r"score_mod returns float32 of shape \(3,\); expected a function f\(score, batch",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s + np.ones(N, np.float32)[h]},
            TypeError,
            "score_mod gives NumPy a traced scalar.*expected jax.numpy",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s if i > j else 0.0},
            TypeError,
            "score_mod asks Python whether a traced scalar is true.*expected jnp.where",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s + [1.0, 2.0, 3.0, 4.0][h]},
            TypeError,
            "score_mod gives Python a traced scalar.*expected an array",
        ),
        ({"score_mod": lambda s, b, h, i, j: (s, s)}, TypeError, "score_mod returns a tuple"),
        (
            {"score_mod": lambda s, b, h, i, j: s + jax.random.normal(folded(h))},
            TypeError,
            "score_mod reads an array of dtype key<fry>; expected numbers",
        ),
        (
            {"score_mod": scores.alibi(np.ones(K, np.float32))},
            ValueError,
            f"score_mod reads an array of {K} heads; expected one of query's N = {N}",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s, "softcap": 3.0},
            ValueError,
            "score_mod and softcap are both given; expected one of them",
        ),
    ],
)
def test_wrong_functions_are_named(options, kind, error):
    with pytest.raises(kind, match=error):
        flash_attention(*qkv(), backend="xla", **options)


def test_cpu_kernels_leave_functions_to_xla():
    f, arrays = scores.tanh(2.0), qkv()
    with pytest.raises(NotImplementedError, match="the CPU kernels have no score functions"):
        flash_attention(*arrays, score_mod=f, backend="cpu")
    _backends.warn_once.cache_clear()  # there is no warning
    got, want = (flash_attention(*arrays, score_mod=f, backend=b) for b in (None, "xla"))
    close(got, want)
