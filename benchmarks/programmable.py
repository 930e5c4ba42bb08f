"""Measures a user's functions on a GPU, beside PyTorch's FlexAttention and what is built in.

    python benchmarks/programmable.py
    python benchmarks/programmable.py --problems B --cases causal alibi_causal

ALiBi, a table of relative positions and softcap as functions of the scores, full and causal;
causal, documents of 512 and a window of 1024 as functions of the mask; of the sizes of problems A
and B. Beside them attention without a function, and what is built in, where it is. Blocks of a
mask are made before, as FlexAttention's are. Times, checks and files are those of features.py: a
result that is not that of float64 attention has no time. FlexAttention is compiled ahead, a
process for each program. Writes build/benchmarks/<gpu>/programmable-<commit>.json and .md.
"""

import feature_peers
import features
import machine
import shapes
from shapes import Case


def main() -> None:
    """Measures the chosen cases and prints one table."""
    features.main(
        features.Script(
            name="programmable",
            about=__doc__ or "",
            features=shapes.FUNCTIONS,
            cases=shapes.function_cases,
            problems=("A", "B"),
            peers=("jax_flash", feature_peers.FLEX),
            asks=asks,
        )
    )


def asks(case: Case, peer: str) -> bool:
    """FlexAttention has functions alone: what is built in for us is one of these for it."""
    return peer != feature_peers.FLEX or case.blocks or case.score is not None


if __name__ == "__main__":
    machine.require_gpu()
    main()
