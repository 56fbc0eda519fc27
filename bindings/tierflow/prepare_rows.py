"""Turns rows of conversations into token ids for the C++ side, which runs this text with `python -I -c` and talks to it through a socket.

Everything is little-endian. The job, once: u32 length, JSON:

    {"folder": folder of the model's tokenizer or null, "template": text of a chat template or null, "train_on": "assistant" or "all",
     "field": name of the text's field, "skip": pass over bad rows, "files": [{"path": ..., "format": ...}]}

Then frames to the C++ side (script_process.py):

    R  rows: u64 bytes of the files that are done, u32 number of rows, the length of each in tokens, then their words: a token's id, top bit
       set where it is trained on; of a pair of answers ("preference") the chosen row, then the rejected one
    S  a row that was passed over, as JSON: {"where", "why"}
    E  the end, as JSON: {"masks": how the trained tokens were found, "merged": prompts whose last tokens merge with the completion}
    F  the failure that ends it, as JSON: {"where", "why"}

With the argument `decode` or `prompts` it does what prompts.py says.

Ends at the end of its input. Where the machine is at fault: one line on standard error and exit status 4.
"""
import array
import concurrent.futures
import gc
import os
import struct
import sys
import typing

from tierflow.assistant_turns import TurnFinder
from tierflow.chat_template import ChatTemplate, load_tokenizer
from tierflow.named_tokens import NamedTokens
from tierflow.prompts import decode, talk
from tierflow.row_files import TRAINED, BadRow, Refusal, batches, shown
from tierflow.script_process import exit_status, one_line, read_json, send, send_json


# Text: what the template makes of messages.


class Preparer:
    def __init__(self, job):
        self.job = job
        self.train_all = job["train_on"] == "all"
        self.merged = 0
        self.masks = set()
        self.pieces = {}  # short texts already tokenised
        self.encoded_again = 0  # texts of a batch
        self.tokenizer: typing.Any = None
        if any(file["format"] != "tokens" for file in job["files"]):
            self.load(job["folder"])

    def load(self, folder):
        self.tokenizer = tokenizer = load_tokenizer(folder)
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.added = set(tokenizer.added_tokens_decoder)
        self.named = NamedTokens.of(tokenizer)
        self.eos = tokenizer.eos_token
        self.template = ChatTemplate(tokenizer, folder, self.job["template"])
        self.turns = TurnFinder(self.template, self.eos)

    def render_rows(self, tasks):
        """Fills in the texts of rows that have messages; rows that fail have an error."""
        together = []
        for task in tasks:
            if task.error is None and task.messages is not None:
                if task.tools is None and not task.more:
                    together.append(task)
                else:
                    self.guarded(task, lambda task: self.render_alike([task]))
        if not together:
            return
        try:
            self.render_alike(together)
        except BadRow:
            for task in together:
                self.guarded(task, lambda task: self.render_alike([task]))

    def render_alike(self, tasks):
        """Rows with the same tools and variables."""
        shared = tasks[0].tools, tasks[0].more
        finds = not self.train_all
        marks = finds and self.template.marks(tasks[0].tools)
        conversations = [task.messages for task in tasks]
        texts, spans = self.template.marked_texts(conversations, *shared) if marks else (self.template.texts(conversations, *shared), [[]] * len(tasks))
        for task, text, marked in zip(tasks, texts, spans):
            task.texts, task.error, task.between_tokens = [text], None, False
            task.spans = [span for span in marked if span[0] < span[1]]
        prompts = [task for task in tasks if task.prompt is not None]
        if prompts and finds:
            texts = self.template.texts([task.prompt for task in prompts], *shared, add_generation_prompt=True)
            for task, text in zip(prompts, texts):
                task.texts.append(text)
        chats = [task for task in tasks if task.prompt is None]
        if chats and finds:
            if marks:
                self.masks.add("generation")
            else:
                self.find_turns(chats, *shared)

    def guarded(self, task, work):
        try:
            work(task)
        except BadRow as error:
            task.error = error

    def find_turns(self, tasks, tools, more):
        """Characters of the assistant's turns."""
        for task in tasks:
            if task.messages[0]["role"] == "assistant":
                task.error = BadRow("begins with the assistant: there is nothing that it answers")
        tasks = [task for task in tasks if task.error is None]
        found = self.turns.spans([task.messages for task in tasks], [task.texts[0] for task in tasks], tools, more)
        for task, spans in zip(tasks, found):
            task.between_tokens = True
            task.spans = [(begin, end) for begin, end in spans or () if begin < end]
        rest = [task for task, spans in zip(tasks, found) if spans is None]
        self.masks |= {"contents"} if len(rest) < len(tasks) else set()
        if rest:
            self.masks.add("prefixes")
            self.find_by_prefixes(rest, tools, more)

    def find_by_prefixes(self, tasks, tools, more):
        """What each turn adds to the rendering of the messages before it."""
        turns = [(task, [at for at, message in enumerate(task.messages) if message["role"] == "assistant"]) for task in tasks]
        befores = self.template.prefixes([(task.messages, places) for task, places in turns], tools, more, add_generation_prompt=True)
        ends = [(task.messages, [at + 1 for at in places if at + 1 < len(task.messages)]) for task, places in turns]
        afters = self.template.prefixes(ends, tools, more)
        for (task, places), starts, stops in zip(turns, befores, afters):
            whole = task.texts[0]
            for at, before, after in zip(places, starts, [*stops, whole]):
                for text in (before, after):
                    if task.error is None and not whole.startswith(text):
                        task.error = BadRow(self.difference(text, whole, at))
                if task.error is None and len(before) < len(after):
                    task.spans.append((len(before), len(after)))

    def difference(self, text, whole, at):
        ids, all_ids = (self.backend.encode(t, add_special_tokens=False).ids for t in (text, whole))
        place = next((i for i, (a, b) in enumerate(zip(ids, all_ids)) if a != b), min(len(ids), len(all_ids)))
        words = [shown(self.tokenizer.decode(some[place : place + 4])) for some in (ids, all_ids)]
        return (
            f"the chat template renders message {at} and those before it otherwise where others follow: token {place} begins {words[0]}, "
            f"and {words[1]} in the whole; name a template that marks the assistant's turns with {{% generation %}} with --chat-template, "
            "or train on all tokens with --train-on all"
        )

    # Tokens.

    def words(self, tasks):
        """Fills in the words of rows that have texts."""
        for special in (False, True):
            chosen = [task for task in tasks if task.error is None and task.texts and (task.kind in ("text", "completion")) == special]
            if not chosen:
                continue
            texts = []
            for task in chosen:
                if special:
                    self.end_text(task)
                texts += task.texts
            try:
                by_characters = self.named is None and any(task.spans for task in chosen)
                encode = self.backend.encode_batch if by_characters else self.backend.encode_batch_fast
                encodings = iter(encode(texts, add_special_tokens=special))
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException as error:  # a panic of the library is no Exception
                raise Refusal(self.job["folder"], f"has a tokenizer that fails on the text: {one_line(error)}") from None
            for task in chosen:
                found = [next(encodings) for _ in task.texts]
                self.guarded(task, lambda task: self.mark(task, found, by_characters))
            if self.encoded_again > len(chosen) // 8:
                self.named = None
            self.encoded_again = 0
        for task in tasks:
            if task.second and task.words is not None and task.other.words is not None:
                self.level(task, task.other)

    @staticmethod
    def level(*pair):
        """Both answers begin where the first of them does."""
        start = min(int((row.words >= TRAINED).argmax()) if (row.words >= TRAINED).any() else len(row.words) for row in pair)
        for row in pair:
            row.words[start:] |= TRAINED

    def end_text(self, task):
        """With the end-of-text token, where there is one and it is not there."""
        if self.eos and not task.texts[0].endswith(self.eos):
            task.texts[0] += self.eos
        if task.kind == "completion":
            task.texts[0] = task.texts[1] + task.texts[0]

    def mark(self, task, encodings, by_characters):
        import numpy

        encoding, ids = encodings[0], encodings[0].ids
        words = numpy.frombuffer(array.array("I", ids), dtype=numpy.uint32)
        if self.train_all or task.kind == "text":
            words |= TRAINED
        elif len(encodings) == 2:
            prompt = numpy.array(encodings[1].ids, dtype=numpy.uint32)
            both = min(len(prompt), len(words))
            differ = numpy.flatnonzero(prompt[:both] != words[:both])
            same = int(differ[0]) if len(differ) else both
            self.merged += same < len(prompt)
            words[same:] |= TRAINED
        elif task.spans:
            edges = self.edges(task, encoding if by_characters else None, ids)
            for first, stop in zip(edges[::2], edges[1::2]):
                numpy.bitwise_or(words[first:stop], TRAINED, out=words[first:stop])
        task.words = words

    def edges(self, task, encoding, ids):
        """The tokens at which spans begin and end. encoding: with the characters of each token, if there is one."""
        text, cuts = task.texts[0], [cut for span in task.spans for cut in span]
        if encoding is None:
            if (found := self.named.tokens_at(text, ids, cuts, self.alone)) is not None:
                return found
            self.encoded_again += 1
            encoding = self.backend.encode(text, add_special_tokens=False)
        if task.between_tokens:
            return [self.token_of_cut(text, encoding, ids, cut) for cut in cuts]
        tokens = [token_at(encoding, cut) for cut in cuts]
        for at in range(1, len(cuts), 2):  # a token that is marked in part is trained on
            tokens[at] += tokens[at] < len(ids) and encoding.token_to_chars(tokens[at])[0] < cuts[at]
        return tokens

    def alone(self, piece):
        """The ids of a piece of text, of short ones those that were kept."""
        ids = self.pieces.get(piece)
        if ids is None:
            ids = self.backend.encode(piece, add_special_tokens=False).ids
            if len(piece) < 256 and len(self.pieces) < 10000:
                self.pieces[piece] = ids
        return ids

    def token_of_cut(self, text, encoding, ids, cut):
        """The token that begins there. Refuses the row unless the text up to there has the same tokens alone as it has in the whole. Tokens that the tokenizer was
        given by name part the text before anything else happens, so what stands before the last of them cannot differ."""
        at = token_at(encoding, cut)
        if at < len(ids) and encoding.token_to_chars(at)[0] < cut:
            raise BadRow(f"token {at} lies partly in the assistant's turn and partly outside; {self.remedy()}")
        first = at - 1
        while first > 0 and ids[first] not in self.added:
            first -= 1
        first = max(first, 0)
        alone = self.alone(text[encoding.token_to_chars(first)[0] if first > 0 else 0 : cut])
        if ids[first:at] != alone:
            place = next((i for i, (a, b) in enumerate(zip(alone, ids[first:at])) if a != b), min(len(alone), at - first))
            raise BadRow(f"token {first + place} is another where the text ends with the assistant's turn; {self.remedy()}")
        return at

    @staticmethod
    def remedy():
        return "name a template that marks the assistant's turns with {% generation %} with --chat-template, or train on all with --train-on all"


def token_at(encoding, position):
    """The first token that ends behind this character; the number of tokens where there is none."""
    token = encoding.char_to_token(position)
    if token is not None:
        return token
    count = len(encoding)
    if count == 0 or encoding.token_to_chars(count - 1)[1] <= position:
        return count
    for near in range(position + 1, position + 16):
        token = encoding.char_to_token(near)
        if token is not None:
            return token
    return next(at for at, (_, end) in enumerate(encoding.offsets) if end > position)


# The way through.


def send_rows(stream, tasks, done, skip):
    for task in tasks:
        if task.other is not None:  # both go, or none
            task.error = task.error or task.other.error
        if task.error is not None and not task.second:
            if not skip:
                raise Refusal(task.where, f"{task.error}")
            send_json(stream, "S", {"where": task.where, "why": one_line(task.error, 600)})
    rows = [task.words for task in tasks if task.error is None]
    words = [array.array("I", row) if isinstance(row, list) else row for row in rows]
    lengths = array.array("I", map(len, rows))
    send(stream, "R", b"".join([struct.pack("<QI", done, len(rows)), lengths.tobytes(), *(row.tobytes() for row in words)]))


def prepare(job, stream):
    preparer = Preparer(job)

    def finish(tasks, done):
        preparer.words(tasks)
        send_rows(stream, tasks, done, job["skip"])

    # Templates are rendered while the batch before is tokenised.
    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        pending = None
        for tasks, done in batches(job):
            preparer.render_rows(tasks)
            if pending is not None:
                pending.result()
            pending = worker.submit(finish, tasks, done)
        if pending is not None:
            pending.result()
    send_json(stream, "E", {"masks": sorted(preparer.masks), "merged": preparer.merged})


def main(arguments):
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_NO_ADVISORY_WARNINGS="1", TRANSFORMERS_VERBOSITY="error")
    gc.set_threshold(200000)  # rows are many objects and no cycles
    sys.modules["torch"] = None  # type: ignore[assignment]  # not needed, and slow to load
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    job = read_json(requests)
    try:
        if job is None:
            return 0
        if arguments == ["decode"]:
            decode(job, requests, answers)
        elif arguments == ["prompts"]:
            talk(job, requests, answers)
        else:
            prepare(job, answers)
    except Refusal as refusal:
        send_json(answers, "F", {"where": refusal.args[0], "why": refusal.args[1]})
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:]), "a Python package that chat rows need (pip install transformers)"))
