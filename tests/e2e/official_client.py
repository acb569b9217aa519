"""The official client of the server's protocol; where it is not installed, the tests that import it from here are
skipped and say so."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai", reason="openai, of the development extra, is not installed")
