"""Whether a text is an address that the HTTP client takes: the one check of every base_url in a recipe or an option."""

from __future__ import annotations

import re

HOW = "write it as http://localhost:8000/v1"
_FORM = re.compile(r"https?://[^/\s@]+(/\S*)?")
_LAST_PORT = 65_535


def is_address(url: str) -> bool:
    """Whether it is of http or https, without a user, and httpx and the name service take its port, brackets and host
    name. Without httpx, of which the client itself says that it is missing, only the form is known."""
    if not _FORM.fullmatch(url):
        return False
    try:
        import httpx
    except ImportError:
        return True
    try:
        address = httpx.URL(url)
        host = address.host  # decoded: raises for a label that is no Punycode
        address.raw_host.decode("ascii").encode("idna")  # as a socket does, for labels that are empty or too long
    except (httpx.InvalidURL, UnicodeError):  # IDNAError is a UnicodeError
        return False
    return bool(host) and (address.port is None or 0 < address.port <= _LAST_PORT)
