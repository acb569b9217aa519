"""vLLM's parsers of tool calls alone: modules that only its engine and server need are stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic_core import core_schema

# modules that are vLLM's own; "x." stands for all modules of a package
_OWN = re.compile(
    r"vllm\.(envs|exceptions|utils\.collection_utils|tool_parsers(\..*)?|reasoning(\..*)?|parser(\.(?!metrics).*)?"
    r"|entrypoints\.openai\.(engine|chat_completion)\.protocol|entrypoints\.openai\.parser\.harmony_utils)"
)


class StandIn(str):
    """What a stand-in's functions and classes are, and what calling them gives: false, and a type of pydantic's."""

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        return StandIn

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> core_schema.CoreSchema:
        return core_schema.any_schema()


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (StandIn,), {})


class _Finder:
    """Finds stand-ins for the modules of vLLM that are not in _OWN. A package's __init__ does not run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm" or _OWN.fullmatch(name):
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(self.folder.parent.joinpath(*name.split(".")))]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def vllm_module(name: str) -> ModuleType:
    """A module of the installed vLLM. Raises ImportError where there is none."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
        sys.meta_path.insert(0, _Finder(Path(found.origin).parent))
    return importlib.import_module(f"vllm.{name}")
