"""GET /preft: one page that shows a running server. It holds no data; its script asks the routes, with the key."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re

from starlette.responses import HTMLResponse

PATH = "/preft"
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@functools.cache
def status_page() -> tuple[str, str]:
    """The page, and the policy under which browsers run its script and nothing else."""
    text = importlib.resources.files("preft.serve.http").joinpath("status_page.html").read_text(encoding="utf-8")
    scripts = _SCRIPT.findall(text)
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def answer() -> HTMLResponse:
    """The page as an answer."""
    text, policy = status_page()
    return HTMLResponse(
        text,
        headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"},
    )
