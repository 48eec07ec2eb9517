"""Run a module of this copy of the package as a program: `python -P run_module.py MODULE ARGUMENTS`.

The folder of the package comes last in `sys.path`: it may be the working folder, which must not hide Python's own
modules.
"""

import importlib.util
import os
import runpy
import sys


def _main() -> None:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folder, name = os.path.split(package)
    sys.path.append(folder)
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not os.path.samefile(os.path.dirname(found.origin), package):
        # Another copy is installed. The parent process had this copy's folder before it, too.
        sys.path.insert(0, folder)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
