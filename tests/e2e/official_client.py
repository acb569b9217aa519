"""The official client of the server's protocol, and what runs the server. Where one of them is not installed, the tests
that import it from here are skipped and say so."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="starlette, of the extra 'server', is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn, of the extra 'server', is not installed")
openai = pytest.importorskip("openai", reason="openai, of the development extra, is not installed")
