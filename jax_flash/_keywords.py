"""Keywords that other libraries have for ours: an error says which of ours is meant."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# A keyword of others, and what we have for it: of several the first that a function takes.
_OURS: dict[str, tuple[str, ...]] = {
    "q": ("query",),
    "k": ("key", "new_key"),
    "v": ("value", "new_value"),
    "causal": ("is_causal",),
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "window_size": ("local_window_size, with None in place of -1 for a side without a limit",),
    "window": ("local_window_size",),
    "sliding_window": ("local_window_size",),
    "segment_ids": ("query_segment_ids and key_value_segment_ids",),
    "q_segment_ids": ("query_segment_ids",),
    "kv_segment_ids": ("key_value_segment_ids",),
    "cu_seqlens": ("query_segment_ids and key_value_segment_ids",),
    "cu_seqlens_q": ("query_segment_ids",),
    "cu_seqlens_k": ("key_value_segment_ids",),
    "cu_seqlens_kv": ("key_value_segment_ids",),
    "seqused_q": ("query_seq_lengths",),
    "seqused_k": ("key_value_seq_lengths",),
    "lengths": ("key_value_seq_lengths",),
    "seq_lengths": ("query_seq_lengths and key_value_seq_lengths", "lengths"),
    "kv_lengths": ("key_value_seq_lengths", "lengths"),
    "kv_lens": ("key_value_seq_lengths", "lengths"),
    "positions": ("query_positions and key_value_positions",),
    "attn_mask": ("mask",),
    "attention_mask": ("mask",),
    "key_padding_mask": ("key_value_seq_lengths, or a mask [B, 1, 1, S]", "mask"),
    "enable_gqa": ("key and value of fewer heads, which needs no option",),
    "mask_mod": ("block_mask=jax_flash.block_mask(mask_mod, ...)",),
    "attn_bias": ("bias",),
    "ab": ("bias",),
    "alibi_slopes": ("score_mod=jax_flash.scores.alibi(slopes)",),
    "logits_soft_cap": ("softcap",),
    "attn_logits_soft_cap": ("softcap",),
    "soft_cap": ("softcap",),
    "logit_cap": ("softcap",),
    "s_aux": ("sinks",),
    "dropout_p": ("dropout_rate",),
    "dropout": ("dropout_rate",),
    "dropout_rng": ("dropout_key",),
    "dropout_seed": ("dropout_key",),
    "return_softmax_lse": ("return_lse", "return_residual"),
    "return_attn_probs": ("return_lse",),
    "return_residual": ("return_lse",),
    "return_lse": ("return_residual",),
    "implementation": ("backend",),
    "backend": ("implementation",),
    "k_cache": ("key_cache",),
    "v_cache": ("value_cache",),
    "cache_seqlens": ("lengths, which count the new positions too",),
    "context_lens": ("lengths",),
    "seq_lens": ("lengths", "key_value_seq_lengths"),
    "cu_q_lens": ("query_starts", "query_segment_ids"),
    "num_seqs": ("rows",),
    "block_table": ("page_table",),
    "block_tables": ("page_table",),
    "page_indices": ("page_table",),
    "B": ("batch",),
    "H": ("heads",),
    "Q_LEN": ("q_len",),
    "KV_LEN": ("kv_len",),
    "BLOCK_SIZE": ("block",),
}
_taken: dict[str, tuple[str, ...]] = {}  # by each function


def hinted(function: F) -> F:
    """Lets errors for an unknown keyword, or too many arguments without one, say what is taken."""
    name = function.__name__
    parameters = inspect.signature(function).parameters
    taken = _taken[name] = tuple(parameters)
    named = tuple(x for x in taken if parameters[x].kind is inspect.Parameter.KEYWORD_ONLY)
    most = len(taken) - len(named)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > most:
            raise TypeError(
                f"{name} got {len(arguments)} arguments without a keyword; expected "
                f"{', '.join(taken[:most])}, and others by keyword, such as {', '.join(named[:5])}"
            )
        check(name, keywords, taken)
        return function(*arguments, **keywords)

    return call  # type: ignore[return-value]


def check(function: str, keywords: Iterable[str], taken: Iterable[str]) -> None:
    """Raises a TypeError for a keyword that is not taken."""
    taken = tuple(taken)
    for name in keywords:
        if name not in taken:
            raise TypeError(
                f"{function} got an unexpected keyword argument {name!r}{hint(name, taken)}"
            )


def hint(name: str, taken: tuple[str, ...]) -> str:
    """Says which of the keywords that are taken is meant by another, or nothing."""
    ours = _OURS.get(name, ())
    for meant in (*ours, *difflib.get_close_matches(name, taken, 1)):
        if _keyword(meant) in taken:
            return f"; did you mean {meant}?"
    for meant in (name, *ours):
        if _keyword(meant) in _taken["flash_attention"]:
            return f"; jax_flash.flash_attention takes {meant}"
    return ""


def _keyword(meant: str) -> str:
    """Reads the keyword that a text of `_OURS` begins with."""
    return meant.replace(",", " ").replace("=", " ").split()[0]
