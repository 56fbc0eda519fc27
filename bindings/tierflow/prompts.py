"""What the C++ side asks of a tokenizer while it runs: texts of ids, and ids of prompts. The program runs this text as one with prepare_rows.py.

With the argument `decode` the job is {"folder": ...} and each request u32 length, JSON list of lists of ids; the answer is a T frame, JSON list
of their texts.

With the argument `prompts` the job is {"folder": ..., "template": text of a chat template or null} and each request u32 length, JSON; the answer is a T frame, JSON:

    {"prompts": [{"text": ...} or a row of messages, ...]}    their lists of ids; after messages follows what begins the assistant's turn
    {"tokens": [text of a token, ...]}                        their ids
    {"texts": [[id, ...], ...]}                               their texts without special tokens
"""
import signal
import typing

from tierflow.chat_template import ChatTemplate, load_tokenizer
from tierflow.row_files import BadRow, Refusal, Row, fill, shown
from tierflow.script_process import read_json, send_json


def decode(job, requests, answers):
    tokenizer: typing.Any = load_tokenizer(job["folder"])
    while (lists := read_json(requests)) is not None:
        send_json(answers, "T", [tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in lists])


class Prompts:
    def __init__(self, job):
        self.folder = job["folder"]
        self.tokenizer = load_tokenizer(self.folder)
        self.template = ChatTemplate(self.tokenizer, self.folder, job["template"])

    def ids_of_prompt(self, prompt, number):
        if "text" in prompt:
            return self.tokenizer(prompt["text"])["input_ids"]
        row = Row(f"prompt {number}")
        try:
            fill(row, prompt, {}, "messages")
            texts = self.template.texts([row.messages], row.tools, row.more, add_generation_prompt=True)
        except BadRow as error:
            raise Refusal("", f"prompt {number}: {error}") from None
        return self.tokenizer(texts[0], add_special_tokens=False)["input_ids"]

    def id_of_token(self, token):
        """Of a token by its name in the vocabulary, or by its text, which may be another, as that of a line's end."""
        known = self.tokenizer.get_vocab().get(token)
        if known is not None:
            return known
        ids = self.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise Refusal(self.folder, f"has no token {shown(token)} in its tokenizer")
        return ids[0]

    def answer(self, request):
        if "prompts" in request:
            return [self.ids_of_prompt(prompt, number) for number, prompt in enumerate(request["prompts"], 1)]
        if "tokens" in request:
            return [self.id_of_token(token) for token in request["tokens"]]
        return [self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in request["texts"]]


def talk(job, requests, answers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; texts are still asked for then
    prompts = Prompts(job)
    while (request := read_json(requests)) is not None:
        send_json(answers, "T", prompts.answer(request))
