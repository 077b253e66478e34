"""Write the shipped `groups.jsonl`: PYTHONPATH=.:tests python -m support.calibration_set"""

from __future__ import annotations

import json

from ingest.calibration.shipped import PATH
from support.calibration_set import figures, questions, refunds, tool_use


def shipped_text() -> str:
    """Return the content of the file."""
    made = [*refunds.cases(), *questions.cases(), *tool_use.cases(), *figures.cases()]
    return "".join(f"{json.dumps(one)}\n" for one in made)


if __name__ == "__main__":
    PATH.write_text(shipped_text(), encoding="utf-8")
