"""Lists the benchmarks, or runs one by its name: the front door to this folder.

python benchmarks                              # what there is
python benchmarks features --problems A        # as python benchmarks/features.py --problems A
"""

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Runs what the command line names, with the rest of it, in this process."""
    found = programs()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("python benchmarks NAME [options]; --help behind a name lists its options.\n")
        print("\n".join(f"  {name:12s}{about}" for name, about in found.items()))
        return
    if name not in found:
        raise SystemExit(f"no benchmark is called {name!r}: there are {', '.join(found)}")
    # As of a script of its own: `python -m` puts the checkout ahead of what is installed.
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.insert(0, str(FOLDER))
    del sys.argv[1]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def programs() -> dict[str, str]:
    """Reads what there is: by name, the first line of what its file says of itself."""
    files = [x for x in FOLDER.glob("*.py") if x.name != "__main__.py"]
    files += FOLDER.glob("*/__main__.py")
    named = {x.stem if x.parent == FOLDER else x.parent.name: x for x in files}
    return {
        name: (ast.get_docstring(ast.parse(named[name].read_text())) or "").split("\n")[0]
        for name in sorted(named)
    }


if __name__ == "__main__":
    main()
