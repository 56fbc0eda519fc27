"""Conversations as text: a tokenizer's chat template, rendered by transformers."""
import re
import typing

from tierflow.row_files import BadRow, Refusal
from tierflow.script_process import one_line

OF_DICTS = frozenset(dir(dict))
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """The template of a tokenizer, or the one with this text."""

    def __init__(self, tokenizer, folder, text):
        from transformers.utils import chat_template_utils

        self.tokenizer, self.folder, self.text = tokenizer, folder, text
        self.library: typing.Any = chat_template_utils
        self.compile: typing.Any = getattr(chat_template_utils, "_compile_jinja_template", None)
        self.variables = dict(tokenizer.special_tokens_map)
        self.chosen = {}
        self.quick = {}

    def of(self, tools):
        """The text for rows with tools, or without; and whether it marks the assistant's turns."""
        named = bool(tools)
        if named not in self.chosen:
            try:
                text = self.tokenizer.get_chat_template(self.text, [{}] if named else None)
            except ValueError:
                several = getattr(self.tokenizer, "chat_template", None)
                if self.text is None and isinstance(several, dict) and several:
                    names = ", ".join(map(str, sorted(several)))
                    raise Refusal(self.folder, f"has several chat templates ({names}) and none of them is the default: save one to a file and name it with --chat-template") from None
                raise Refusal(
                    self.folder, "has a tokenizer without a chat template: name one with --chat-template, or give rows of prompt and completion strings"
                ) from None
            self.chosen[named] = (text, bool(GENERATION.search(text)))
        return self.chosen[named]

    def marks(self, tools):
        return self.of(tools)[1]

    def texts(self, conversations, tools, more, add_generation_prompt=False):
        """Their texts. more: variables of the rows' own."""
        found = self.prefixes([(messages, [len(messages)]) for messages in conversations], tools, more, add_generation_prompt)
        return [text for (text,) in found]

    def marked_texts(self, conversations, tools, more):
        """Their texts, and the characters of each that the template marks."""
        return self.by_library(conversations, tools, more, return_assistant_tokens_mask=True)

    def prefixes(self, conversations, tools, more, add_generation_prompt=False):
        """The texts of the beginnings of each conversation: (messages, how many of them for each text)."""
        if tools is None and not more and self.compile is not None:
            source, _ = self.of(None)
            texts = self.guarded(lambda: self.quickly(source, conversations, add_generation_prompt))
            if self.is_as_by_library(conversations, texts, add_generation_prompt):
                return texts
            self.compile = None
        flat = [messages[:count] for messages, counts in conversations for count in counts]
        texts = iter(self.by_library(flat, tools, more, add_generation_prompt=add_generation_prompt)[0])
        return [[next(texts) for _ in counts] for _, counts in conversations]

    def by_library(self, conversations, tools, more, **options):
        variables = {**self.variables, **more}
        text, _ = self.of(tools)
        return self.guarded(lambda: self.library.render_jinja_template(conversations=conversations, tools=tools, chat_template=text, **options, **variables))

    def is_as_by_library(self, conversations, texts, add_generation_prompt):
        """Looks at the first text: another version of the library may do more to messages."""
        for (messages, counts), found in zip(conversations, texts):
            if counts:
                return self.by_library([messages[: counts[0]]], None, {}, add_generation_prompt=add_generation_prompt)[0] == found[:1]
        return True

    def quickly(self, source, conversations, add_generation_prompt):
        """prefixes() as the library renders them, without its copies of the messages, which come from JSON and are plain already, and with the variables
        put together once."""
        from jinja2.runtime import Context

        template = self.quick_template(source)
        fill = getattr(self.library, "_alias_reasoning_fields", list)
        plain = getattr(self.library, "_plain_template_data", dict)
        known = {**template.globals, **plain(self.variables), "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        found = []
        for messages, counts in conversations:
            plainly = all(len(message) == 2 and "content" in message for message in messages)  # beside its role: nothing to fill in
            filled = messages if plainly or not counts else fill(messages)
            contexts = [Context(template.environment, {**known, "messages": filled[:count]}, template.name, template.blocks) for count in counts]
            found.append(["".join(template.root_render_func(context)) for context in contexts])
        return found

    def quick_template(self, source):
        """The library's template, in which a field of a message is found without looking first for an attribute of dicts: most of what a template does."""
        if source not in self.quick:
            environment = self.compile(source).environment.overlay()
            usual = environment.getattr

            def field_or_attribute(owner, name):
                return owner[name] if type(owner) is dict and name in owner and name not in OF_DICTS else usual(owner, name)

            setattr(environment, "getattr", field_or_attribute)
            self.quick[source] = environment.from_string(source)
        return self.quick[source]

    def guarded(self, render):
        try:
            return render()
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except Exception as error:
            if type(error).__name__ == "TemplateSyntaxError":
                what = "has a chat template that" if self.text is None else "the chat template given in place of its own"
                raise Refusal(self.folder, f"{what} is no template: {one_line(error)}") from None
            raise BadRow(f"the chat template refuses it: {one_line(error)}") from None


def load_tokenizer(folder) -> typing.Any:
    from transformers import AutoTokenizer

    if folder is None:
        raise Refusal("", "rows of text need the model's tokenizer: its folder has no tokenizer.json; copy it there, or name one with --tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise Refusal(folder, f"holds no tokenizer that transformers loads: {one_line(error)}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise Refusal(folder, "has a tokenizer without tokenizer.json: save it with transformers' save_pretrained from a fast tokenizer")
    return tokenizer
