"""Processes that tests start import torch's compiler when something is compiled, not at their first optimizer.

That import takes one of the two seconds of a processor that a process needs to begin, and few of them compile anything.
The first optimizer asks the compiler for two functions, `disable` and `graph_break`, which do nothing where nothing is
compiled; here they can be had without it. Whatever else is asked of the module, or an import of one of its parts,
imports it whole. `tests/conftest.py` sets PYTHONPATH, so that Python imports this file in each process at its start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class _Compiler(ModuleType):
    """The module before it is imported whole."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # as of any module, also for who looks through all of them
        return getattr(_import_whole(), name)

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing: no graph is traced."""

    def disable(self, function: Any = None, *options: Any, **named: Any) -> Any:
        """The function as it is, until the compiler is there."""
        if function is None:
            return _import_whole().disable(function, *options, **named)
        disabled: list[Callable[..., Any]] = []

        def call(*arguments: Any, **keywords: Any) -> Any:
            if isinstance(sys.modules[COMPILER], _Compiler):
                return function(*arguments, **keywords)
            if not disabled:
                disabled.append(sys.modules[COMPILER].disable(function, *options, **named))
            return disabled[0](*arguments, **keywords)

        return call


def _import_whole() -> ModuleType:
    module = sys.modules[COMPILER]
    assert module.__spec__ is not None
    loader = module.__spec__.loader
    if isinstance(loader, _Later):
        module.__class__ = ModuleType
        module.__loader__ = module.__spec__.loader = loader.whole
        loader.whole.exec_module(module)
    return module


class _Later(Loader):
    def __init__(self, whole: Loader) -> None:
        self.whole = whole

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Compiler


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith(COMPILER + ".") and COMPILER in sys.modules:
            _import_whole()
        if name != COMPILER or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        spec.loader = _Later(spec.loader)
        return spec


FINDER = _Finder()
sys.meta_path.insert(0, FINDER)
