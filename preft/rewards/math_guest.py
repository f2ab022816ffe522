"""The program that compares mathematical answers for `preft.rewards.math`, confined like any other guest.

math-verify turns texts into expressions with parsers that call `eval`, and simplifies them in calls that no alarm can
interrupt. So it runs here, where neither can do harm, and is killed from outside when it takes too long.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

MEMORY_BYTES = 2 << 30
PARSING_S = 5


def main() -> None:
    """Answers lines of `[answer, gold]` with lines of `true` or `false`, until the input ends."""
    import logging

    import math_verify
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    logging.disable()
    kept = runpy.run_path(os.path.join(os.path.dirname(__file__), "confinement.py"))
    job = json.loads(sys.stdin.readline())
    try:
        kept["die_with_parent"]()
        kept["limit"](cpu_s=1 << 30, memory_bytes=MEMORY_BYTES, file_bytes=0)
        kept["confine"](job["readable"], None)
    except kept["ConfinementError"] as error:
        _say({"unconfined": str(error)})
        return
    _say({"ready": True})
    forms = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parse(text: str) -> Any:
        return math_verify.parse(text, forms, parsing_timeout=PARSING_S)

    for line in sys.stdin:
        answer, gold = json.loads(line)
        try:
            wanted = parse(gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}")
            equal = bool(wanted) and math_verify.verify(wanted, parse(answer), timeout_seconds=PARSING_S)
        except MemoryError:
            equal = False
        _say(bool(equal))


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
