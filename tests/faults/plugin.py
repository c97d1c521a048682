"""A plugin of pytest that plants the fault which the environment names: when its module is imported, other source is compiled.

No file is written, so that nothing is left of a fault when a run ends, however it ends.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

from tests.faults.table import FAULTS, Fault, planted

VARIABLE = "SPECJAX_FAULT"


class Loader(importlib.machinery.SourceFileLoader):
    """Of a module with a fault in it."""

    def __init__(self, name: str, path: str, fault: Fault):
        super().__init__(name, path)
        self.fault = fault

    def get_code(self, fullname):
        return compile(planted(self.fault, Path(self.path).read_text()), self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds that module, and no other."""

    def __init__(self, fault: Fault):
        self.fault = fault

    def find_spec(self, fullname, path, target=None):
        if fullname != self.fault.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Loader(fullname, spec.origin, self.fault)
        return spec


if VARIABLE in os.environ:
    here = FAULTS[os.environ[VARIABLE]]
    if here.module in sys.modules:
        raise RuntimeError(f"{here.module} was imported before its fault could be planted")
    sys.meta_path.insert(0, Finder(here))
