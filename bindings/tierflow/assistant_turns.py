"""Where the assistant's turns stand in a rendered conversation. The program runs this text as one with row_files.py and others.

A conversation is rendered a second time, with a mark in each message where its content begins or ends. Without the marks that text has to be the first one, so
each mark stands for a place in it. A turn begins behind the words with which the template asks for an answer, and ends with those that it puts behind one.
"""
import json
import re

from tierflow.row_files import BadRow

MARK = "\ue0f0{}\ue0f1"  # of private use: no text has them
FOUND = re.compile("\ue0f0([0-9]+)\ue0f1")


class TurnFinder:
    def __init__(self, template, eos):
        self.template, self.eos = template, eos
        self.known = {}  # by what rows may give a template: the words around an answer

    def spans(self, conversations, texts, tools, more):
        """For each conversation and its text the characters [begin, end) of the assistant's turns; None where the marks do not tell them."""
        around = self.words_around(tools, more)
        if around is None:
            return [None] * len(texts)
        copies = [marked(messages) for messages in conversations]
        try:
            again = self.template.texts(copies, tools, more)
        except BadRow:
            again = [text for copy in copies for text in self.alone(copy, tools, more)]
        return [turns(messages, text, places(other, text), *around) for messages, text, other in zip(conversations, texts, again)]

    def alone(self, messages, tools, more, **options):
        try:
            return self.template.texts([messages], tools, more, **options)
        except BadRow:
            return [None]

    def words_around(self, tools, more):
        """What the template writes where it asks for an answer, and behind an answer that others follow; None where that cannot be told."""
        key = json.dumps([bool(tools), more], sort_keys=True)
        if key not in self.known:
            if len(self.known) > 1000:
                self.known.clear()
            self.known[key] = self.look(tools, more)
        return self.known[key]

    def look(self, tools, more):
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a" + MARK.format(0)}
        (ended,), (asked,), (answered,) = (
            self.alone(messages, tools, more, add_generation_prompt=asks) for messages, asks in (([question], False), ([question], True), ([question, answer], True))
        )
        if ended is None or asked is None or answered is None or answered.count(MARK.format(0)) != 1:
            return None
        if self.eos and not asked.startswith(ended):
            ended = ended.removesuffix(self.eos)  # which some templates write behind a whole text
        asks, behind = asked[len(ended) :], answered.partition(MARK.format(0))[2]
        if not asked.startswith(ended) or not asks or not behind.endswith(asks):
            return None
        return asks, behind.removesuffix(asks)


def marked(messages):
    """The messages with marks: 2 n and 2 n + 1 where the content of message n begins and ends, without the spaces around it, which templates take away. What the
    assistant writes begins with its thoughts, which templates look for: it has the second mark alone; where it is only a call, the name called has."""
    copies = []
    for at, message in enumerate(messages):
        content, begin, end = message.get("content") or "", MARK.format(2 * at), MARK.format(2 * at + 1)
        body = content.rstrip()
        if message["role"] != "assistant":
            space = len(body) - len(body.lstrip())
            copies.append({**message, "content": content[:space] + begin + body[space:] + end + content[len(body) :]})
        elif body or not message.get("tool_calls"):
            copies.append({**message, "content": body + end + content[len(body) :]})
        else:
            copies.append({**message, "tool_calls": [named(message["tool_calls"][0], end), *message["tool_calls"][1:]]})
    return copies


def named(call, mark):
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        return {**call, "function": named(function, mark)}
    return {**call, "name": f"{call['name']}{mark}"} if isinstance(call, dict) and "name" in call else call


def places(marked_text, text):
    """Where each mark stands, of one that the template repeats the first place; None unless the text is the same without them."""
    if marked_text is None:
        return None
    pieces = FOUND.split(marked_text)
    if "".join(pieces[::2]) != text:
        return None
    found: dict[int, int] = {}
    at = 0
    for piece, number in zip(pieces[::2], pieces[1::2]):
        at += len(piece)
        found.setdefault(int(number), at)
    return found


def turns(messages, text, marks, asks, behind):
    if marks is None:
        return None
    spans, last = [], 0
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, here = marks.get(2 * at - 1), marks.get(2 * at + 1)
        if before is None or here is None or (begin := text.find(asks, max(before, last), here)) < 0:
            return None
        end = len(text) if at + 1 == len(messages) else end_of_turn(message, text, here, marks.get(2 * at + 2), behind)
        if end is None:
            return None
        last = end
        spans.append((begin + len(asks), end))
    return spans


def end_of_turn(message, text, here, following, behind):
    """here: where its content ends, or what it calls is named. following: where the content of the message behind it begins."""
    if message.get("tool_calls"):
        if not behind or following is None or text.count(behind, here, following) != 1:
            return None
        return text.index(behind, here) + len(behind)
    content = message["content"]
    for tail in (content[len(content.rstrip()) :] + behind, behind):
        if text.startswith(tail, here):
            return here + len(tail)
    return None
