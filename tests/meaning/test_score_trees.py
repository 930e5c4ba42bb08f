"""Functions of scores that hypothesis draws: attention and its gradients, those of the arrays too,
beside reference.attention, which evaluates each pair.

HYPOTHESIS_PROFILE=search draws many; the texts of such functions are in test_score_emission.py.
"""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from jax_flash import flash_attention, reference

from ..score_trees import REACH, function_of, trees
from ..small import close, normal

B, T, S, N, K, H = 2, 21, 17, 4, 2, 8
Q, KEYS, V, OUT = (normal(i, B, n, heads, H) for i, (n, heads) in enumerate(
    ((T, N), (S, K), (S, K), (T, N))
))  # fmt: skip
ARRAYS = normal(4, B, T), normal(5, N, 2 * REACH + 1)
EXAMPLES = hypothesis.settings().max_examples // 7


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(trees(), trees(), st.booleans())
def test_drawn_functions_and_all_gradients(even, odd, causal):
    def results(attention):
        def loss(q, keys, rows, table):
            of_even, of_odd = function_of(even, rows, table), function_of(odd, rows, table)

            def function(score, batch, head, *at):
                found = (f(score, batch, head, *at) for f in (of_even, of_odd))
                return jnp.where(head % 2 == 0, *found)

            return jnp.vdot(attention(q, keys, V, score_mod=function, is_causal=causal), OUT)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(Q, KEYS, *ARRAYS)

    xla = functools.partial(flash_attention, backend="xla")
    close(results(xla), results(reference.attention), 1e-5)
