"""Scripts of the checkout's benchmarks can be imported; without them their tests are left out."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"

sys.path.insert(0, str(ROOT / "examples"))

if FOLDER.is_dir():
    sys.path.insert(0, str(FOLDER))
else:
    collect_ignore_glob = ["test_benchmark*.py", "test_figures.py"]
