"""Let a Transformers model answer exactly and sparsely, and compare what attention read.

    python examples/transformers_generate.py MODEL prompt.txt --k 16
    python examples/transformers_generate.py FOLDER prompt.txt --gguf FILE.gguf

MODEL is a folder or a name that Transformers knows; --gguf names a GGUF file in the folder (which
Transformers reads with the package `accelerate`). Needs: pip install 'kvsieve[transformers]'
"""

import argparse
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsieve.transformers


def main() -> None:
    """Read the arguments, load the model, and let it answer twice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompt", type=Path, help="a text file")
    parser.add_argument("--gguf", help="name of a GGUF file in the model's folder")
    parser.add_argument("--k", type=int, default=32, help="budget in blocks of 32 tokens")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    source = {"gguf_file": arguments.gguf} if arguments.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **source)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, **source
    ).eval()
    text = arguments.prompt.read_text(encoding="utf-8")
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    prompt_len = inputs["input_ids"].shape[1]
    print(f"{prompt_len} tokens in the prompt")

    runs = {
        "exact": kvsieve.transformers.exact(model),
        f"sparse, k={arguments.k}": kvsieve.transformers.sparse(model, k=arguments.k),
    }
    for name, run in runs.items():
        began = perf_counter()
        with run:
            out = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)
        seconds = perf_counter() - began
        attention = run.report().attention
        print(f"\n{name}: {tokenizer.decode(out[0, prompt_len:], skip_special_tokens=True)}")
        print(f"  {seconds:.1f} s, ran {attention.mode}, read {attention.blocks_read} blocks")
        for phase, reads in (("prompt", attention.prefill), ("reply", attention.decode)):
            print(f"  density in the {phase}: {reads.density}")
        if attention.exact_because:
            print(f"  exact because {attention.exact_because}")


if __name__ == "__main__":
    main()
