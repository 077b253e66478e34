"""The groups that `sidecar judge calibrate` takes when no file is named."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).with_name("groups.jsonl")
NAME = "the shipped groups"
"""What errors and results call the file."""
