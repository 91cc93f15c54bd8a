"""Record the logits of PEFT with adapters, for tests/models/test_peft.py. Needs torch, transformers and peft.

    python scripts/peft_oracle.py tests/data/hf/qwen2 tests/data/peft/by_jaxft          # adapters that jaxft saved
    python scripts/peft_oracle.py tests/data/hf/llama tests/data/peft/by_peft --make    # adapters of PEFT's own
    python scripts/peft_oracle.py tests/data/hf/phi3 tests/data/peft/fused_by_peft --make qkv_proj gate_up_proj o_proj

The script writes `logits.json` into the adapter's folder: tokens, and the float32 logits of the base with the adapter.
"""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def main() -> None:
    """Read or make the adapter, run the model once, and write the logits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument(
        "--make", nargs="*", metavar="MODULE", help="first make and save adapters of these modules with random weights"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32, trust_remote_code=False)
    if arguments.make is not None:
        targets = arguments.make or ["q_proj", "v_proj", "o_proj", "down_proj"]
        config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, use_rslora=True, task_type="CAUSAL_LM")
        made = get_peft_model(base, config)
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        made.save_pretrained(arguments.adapter)
        base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32, trust_remote_code=False)
    model = PeftModel.from_pretrained(base, arguments.adapter).eval()
    tokens = torch.randint(0, base.config.vocab_size, (2, 12))
    with torch.no_grad():
        logits = model(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32, trust_remote_code=False)(
            tokens
        ).logits
    assert (logits - plain).abs().max() > 0.01, "the adapter changes nothing: a test with it could not fail"
    recorded = {"tokens": tokens.tolist(), "logits": logits.tolist()}
    (arguments.adapter / "logits.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
