"""Measures what calls take of the host: the first of a program, and each after it.

python benchmarks host first --help
python benchmarks host each --help
"""

import sys

from common import machine

from . import each, first

MEASURES = {"first": first, "each": each}


def main() -> None:
    """Runs the measure that the command line names, with the rest of it."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in MEASURES:
        print(__doc__)
        raise SystemExit(
            0 if name in ("-h", "--help") else f"host measures {' or '.join(MEASURES)}"
        )
    if "--answer" not in sys.argv:
        machine.require_gpu(apart=True)
    del sys.argv[1]
    MEASURES[name].main()


if __name__ == "__main__":
    main()
