"""How the call is differentiated."""

import jax
import jax.numpy as jnp

from jax_flash._problem import Problem


def attend(problem: Problem, backend: str | None, *operands: jax.Array):
    """Computes out and lse `[*B, N, T]`."""
    from jax_flash import reference

    q, k, v, *rest = operands
    terms = problem.name_terms(rest)
    out, lse = reference.attention(
        q,
        k,
        v,
        scale=problem.scale,
        bias=terms.get("bias"),
        mask=terms.get("mask"),
        local_window_size=problem.window,
        causal_align="bottom_right" if problem.bottom_right else "top_left",
        query_seq_lengths=terms.get("query_lengths"),
        key_value_seq_lengths=terms.get("key_value_lengths"),
        query_segment_ids=terms.get("query_segments"),
        key_value_segment_ids=terms.get("key_value_segments"),
        softcap=problem.softcap,
        sinks=terms["sinks"].reshape(-1) if "sinks" in terms else None,
        return_lse=True,
    )
    return out.astype(q.dtype), jnp.swapaxes(lse, -1, -2)
