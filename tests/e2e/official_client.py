"""The official client of the server's protocol, and what runs the server. Where one of them is not installed, the tests
that import it from here can't run and say so."""

from __future__ import annotations

from tests.required import missing

try:
    import openai
    import starlette  # noqa: F401
    import uvicorn
except ModuleNotFoundError as error:
    missing("serve", f"{error.name} is not installed; it is among the packages for development", whole_module=True)

__all__ = ["openai", "uvicorn"]
