"""Loads the demo's result with transformers and lets it continue a line of Python, byte by byte."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

PROMPT = b"def read(self, "

logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
torch.manual_seed(0)
ids = torch.tensor([list(PROMPT)])
ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=120, do_sample=True, temperature=0.7, pad_token_id=0)
print(f"\ntransformers loads {sys.argv[1]}; from {PROMPT.decode()!r} it writes:")
print(bytes(ids[0].tolist()).decode(errors="replace"))
