"""Run by test_stream_memory.py in a process of its own: prints peak resident memory before and after training, as JSON."""

import json
import pathlib
import sys

sys.path.insert(0, sys.argv[1])
import torch  # noqa: E402

torch.set_num_threads(1)
import tierflow  # noqa: E402

FOLDER, FUSED = pathlib.Path(sys.argv[2]), sys.argv[3] == "True"


def peak():
    """The high-water mark of resident memory, bytes."""
    line = next(line for line in open("/proc/self/status", encoding="ascii") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def step(model, opt):
    ids = torch.arange(32).reshape(1, 32) * 5
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


def plan(folder):
    (FOLDER / folder).mkdir()
    budget = tierflow.Budget(device="9MiB", host="11MiB", storage=[FOLDER / folder], activations=0.0)
    return tierflow.plan(FOLDER / "model", budget, allow_any_filesystem=True)


# A small model first: what libraries load and keep on their first use is Python's own footprint.
small = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
tierflow.wrap(small, tierflow.Budget(device="1MiB", host="2MiB"))
opt = tierflow.optim.AdamW(small.parameters())
small(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum().backward()
opt.step()
plan_ = plan("store")
before = peak()
model = tierflow.load(FOLDER / "model", plan_, fused_layers=FUSED).train()
opt = tierflow.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(2):
    step(model, opt)
tierflow.Trainer(model, opt).step([{"input_ids": torch.ones(1, 32, dtype=torch.long), "labels": torch.ones(1, 32, dtype=torch.long)}] * 2)
model.save_pretrained(FOLDER / "out")
e = plan_.estimate
print(json.dumps({"before": before, "peak": peak(), "device": plan_.budget.device, "host": plan_.budget.host,
                  "state": e["state_bytes"] + e["gradient_bytes"], "used": tierflow.stats(model)["memory"]}))  # fmt: skip
