"""Asks a model questions, before and after its adapters: ask.py MODEL ADAPTERS held-out.jsonl. Shows three answers and counts the right ones."""

import json
import logging
import os
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore", FutureWarning)  # of the libraries about each other
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is installed; nothing here takes it
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def answers(model, tokenizer, questions):
    asked = tokenizer.apply_chat_template([[question] for question in questions], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**asked, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return [text.strip() for text in tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)]


def main(base, adapters, path):
    transformers.utils.logging.disable_progress_bar()
    with open(path) as rows:
        chats = [json.loads(row)["messages"] for row in rows]
    questions = [question for question, _ in chats]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    before = answers(model, tokenizer, questions)
    model = peft.PeftModel.from_pretrained(model, adapters).eval()
    after = answers(model, tokenizer, questions)
    for (question, wanted), was, is_now in list(zip(chats, before, after))[:3]:
        print(f"\nquestion: {question['content']}\n  before: {was!r}\n  after:  {is_now!r}\n  right:  {wanted['content']!r}")
    score = [sum(given == wanted["content"] for (_, wanted), given in zip(chats, all_given)) for all_given in (before, after)]
    print(f"\nright answers, of {len(chats)} questions that were not trained on: before {score[0]}, after {score[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
