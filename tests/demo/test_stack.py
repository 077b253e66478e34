"""How the demo starts its engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo.stack import engine_dtype
from learner.policy.logprobs import wants_autocast


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags : fpu sse4_2 avx avx2 avx512f avx512_bf16", "bfloat16"),
        ("flags : avx512f amx_bf16 amx_tile", "bfloat16"),
        ("Features : fp asimd bf16 i8mm", "bfloat16"),
        ("flags : fpu sse4_2 avx avx2 avx512f", "float32"),
        ("Features : fp asimd", "float32"),
    ],
)
def test_bfloat16_is_served_only_where_the_processor_multiplies_it(
    tmp_path: Path, flags: str, dtype: str
) -> None:
    described = tmp_path / "cpuinfo"
    described.write_text(f"processor : 0\n{flags}\nbogomips : 4890\n")

    assert engine_dtype(described) == dtype


def test_the_learner_decides_the_same_for_this_processor() -> None:
    found = engine_dtype(Path("/proc/cpuinfo"))

    assert (found == "bfloat16") == wants_autocast("auto", torch.device("cpu"))


def test_an_unknown_processor_gets_float32(tmp_path: Path) -> None:
    assert engine_dtype(tmp_path / "none") == "float32"
