"""Owns `EXPORT_CHECKS`: the checks of jax.export that a program with attention goes without."""

from jax import export

from jax_flash import _cudnn, _native

# jax.export serialises a custom call only where it is told to, because it cannot vouch for it. An
# export runs with the version of jax_flash that made it; handlers check operands and attributes.
# LayoutConstraint is XLA's own (_products.py).
EXPORT_CHECKS = tuple(
    export.DisabledSafetyCheck.custom_call(name)
    for name in (*_native.targets(), *_cudnn.TARGETS.values(), "LayoutConstraint")
)
"""What `jax.export.export` takes as `disabled_checks` for a program with attention."""
