"""The official client of the server's protocol. Where it or the server's own packages are not installed, the tests that
import it from here are skipped and say so."""

from __future__ import annotations

import pytest

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package}, of the extra 'server', is not installed")
openai = pytest.importorskip("openai", reason="openai, of the development extra, is not installed")
