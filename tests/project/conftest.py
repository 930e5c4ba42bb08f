"""Scripts of the checkout's benchmarks can be imported; without them their tests are left out."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

if FOLDER.is_dir():
    sys.path.insert(0, str(FOLDER))
else:
    collect_ignore_glob = ["test_benchmark*.py", "test_figures.py"]
