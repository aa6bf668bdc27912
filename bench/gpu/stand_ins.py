"""Stand-ins for three packages that the kit leaves out: SGLang imports their names and never calls them.

Loaded by the environment's ``image.pth``. Only SGLang's own imports get one: other packages ask whether
these exist, and the true answer is no.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

PACKAGES = {"IPython", "cutlass", "soundfile"}


class StandInType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __getitem__(cls, _item):
        return cls


def stand_in(name):
    """A class that works as a decorator, and as a decorator's factory for cutlass; else it refuses."""

    def call(_cls, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        if name.startswith("cutlass"):
            return lambda function=None, *_args, **_kwargs: function
        raise RuntimeError(f"{name} is a stand-in and cannot be called")

    return StandInType(name, (), {"__new__": call, "__module__": __name__})


class StandInModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Loader(importlib.abc.Loader):
    def create_module(self, spec):
        module = StandInModule(spec.name)
        module.__path__ = []
        module.__version__ = "0.17.0"
        return module

    def exec_module(self, module):
        pass


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in PACKAGES or sys._getframe(2).f_code.co_name == "find_spec":
            return None
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "") if frame is not None else ""
        if not importer.startswith(("sglang", __name__)):
            return None
        return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)


sys.meta_path.append(Finder())
