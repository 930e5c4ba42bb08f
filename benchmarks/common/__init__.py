"""What several benchmarks need: problems, implementations, the truth, timing, tables.

Whatever measures imports from here first: where the packages that all need are missing, the process
ends with a sentence.
"""

import importlib.util

BENCH = "pip install 'jax_flash[bench]' installs what all benchmarks need"

if _missing := [x for x in ("matplotlib", "tqdm") if importlib.util.find_spec(x) is None]:
    raise SystemExit(f"benchmarks need {' and '.join(_missing)}: {BENCH}")
