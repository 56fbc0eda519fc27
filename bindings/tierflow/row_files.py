"""Rows of conversations as they stand in files: the shapes that people give them, and what is wrong with one. The program runs this text,
script_process.py, chat_template.py, assistant_turns.py, named_tokens.py, prompts.py and prepare_rows.py as one."""
import json

from tierflow.script_process import one_line

LONGEST_LINE = 64 << 20
BATCH_ROWS = 512
BATCH_CHARACTERS = 1 << 20
TRAINED = 1 << 31
BOM = b"\xef\xbb\xbf"
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "observation": "tool", "tool": "tool",
    "function_call": "assistant",
}


class BadRow(Exception):
    """What is wrong with a row."""


class Refusal(Exception):
    """No row can be prepared: where, why."""


def shown(value):
    return json.dumps(value)[:60]


# Rows: from a format's fields to messages, texts or ids.


def field(row, name, kinds, default=None):
    value = row.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kinds):
        raise BadRow(f'has no {"list" if kinds is list else "string"} "{name}"')
    return value


def content_of(message, at):
    """Text, where it comes in parts: joined."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type", "text") == "text" and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise BadRow(f"message {at}: its content is no text; images and other parts are not trained on")


def messages_of(given, what="messages"):
    if not isinstance(given, list) or not given:
        raise BadRow(f'has no message in "{what}"')
    messages = []
    for at, message in enumerate(given):
        if not isinstance(message, dict):
            raise BadRow(f'message {at} of "{what}" is no object with role and content')
        if "from" in message and "role" not in message:
            message = from_sharegpt(message, at)
        role = message.get("role")
        if role not in ROLES:
            raise BadRow(f"message {at} has the role {shown(role)}; roles are {', '.join(ROLES)}")
        content = content_of(message, at)
        if content is None and not message.get("tool_calls"):
            raise BadRow(f"message {at} has no content")
        kept = {key: value for key, value in message.items() if value is not None and key != "content"}
        if content is not None:
            kept["content"] = content
        messages.append(kept)
    return messages


def from_sharegpt(message, at):
    role = SHAREGPT_ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise BadRow(f"message {at} is from {shown(message['from'])}; known are {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(message.get("value"), str):
        raise BadRow(f'message {at} has no string "value"')
    if message["from"] != "function_call":
        return {"role": role, "content": message["value"]}
    try:
        call = json.loads(message["value"])
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadRow(f'message {at} is a function_call whose value is no JSON object with "name" and "arguments"')
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": call}]}


def tools_of(row):
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise BadRow('has "tools" that are no JSON') from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow('has "tools" that are no list of objects')
    return tools or None


def alpaca_messages(row):
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": field(row, "system", str)})
    for turn in field(row, "history", list, []):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise BadRow('has a "history" that is no list of [question, answer]')
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question, more = field(row, "instruction", str), field(row, "input", str, "")
    messages.append({"role": "user", "content": question + ("\n" + more if more else "")})
    messages.append({"role": "assistant", "content": field(row, "output", str)})
    return messages


def integers(row, name, count=None):
    values = field(row, name, list)
    if not all(type(value) is int for value in values) or (count is not None and len(values) != count):
        raise BadRow(f'has "{name}" that are no list of whole numbers' + ("" if count is None else f" as long as input_ids, {count}"))
    return values


def words_of_ids(row, train_all):
    ids = integers(row, "input_ids")
    if any(not 0 <= id < TRAINED - 1 for id in ids):
        raise BadRow('has "input_ids" below 0 or above 2^31-2')
    labels = ids if train_all or row.get("labels") is None else integers(row, "labels", len(ids))
    mask = [1] * len(ids) if row.get("attention_mask") is None else integers(row, "attention_mask", len(ids))
    words = []
    for at, (id, label, seen) in enumerate(zip(ids, labels, mask)):
        if label not in (id, -100):
            raise BadRow(f'has the label {label} where input_ids has {id} (position {at}): a label is that id, or -100; labels are not shifted')
        if seen:
            words.append(id | (TRAINED if label == id else 0))
    return words


class Row:
    """Where it is from, and what becomes of it: texts to encode, then words."""

    def __init__(self, where):
        self.where = where
        self.error = None
        self.kind = ""
        self.words = None  # ready
        self.messages, self.prompt = None, None
        self.tools, self.more = None, {}
        self.texts = []  # to encode: the whole, then the prompt where there is one
        self.spans = []  # of characters: trained
        self.between_tokens = False  # whether they have to begin and end where tokens do
        self.other = None  # of a pair: the other answer
        self.second = False  # of a pair: the rejected one


def parse(raw):
    try:
        row = json.loads(raw.decode("utf-8-sig" if raw.startswith(BOM) else "utf-8"))  # the first is slow
    except UnicodeDecodeError as error:
        raise BadRow(f"is not UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BadRow(f"is no JSON, at {f'column {error.colno}' if error.lineno == 1 else 'its end'}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"is no JSON: {one_line(error, 100)}") from None
    if not isinstance(row, dict):
        raise BadRow("is no JSON object")
    return row


def fill(task, row, job, format):
    """Takes the row's fields."""
    if format == "tokens":
        task.words = words_of_ids(row, job["train_on"] == "all")
        return
    if format == "text":
        task.kind, task.texts = "text", [field(row, job["field"], str)]
        return
    task.tools = tools_of(row)
    task.more = row.get("chat_template_kwargs") or {}
    if not isinstance(task.more, dict):
        raise BadRow('has "chat_template_kwargs" that are no object')
    if format == "prompt-completion":
        fill_completion(task, row, row.get("prompt"), "completion")
        return
    if format == "preference":
        prompt, row = parted(row)
        fill_completion(task, row, prompt, "rejected" if task.second else "chosen")
        return
    task.kind = "chat"
    if format == "alpaca":
        task.messages = alpaca_messages(row)
    elif format == "sharegpt":
        task.messages = messages_of(row.get("conversations"), "conversations")
        if row.get("system") and task.messages[0]["role"] != "system":
            task.messages.insert(0, {"role": "system", "content": field(row, "system", str)})
    else:
        task.messages = messages_of(row.get("messages"))


def fill_completion(task, row, prompt, name):
    if isinstance(prompt, str):
        task.kind, task.texts = "completion", [field(row, name, str), prompt]
        return
    task.kind = "chat completion"
    task.prompt = messages_of(prompt, "prompt")
    task.messages = task.prompt + messages_of(row.get(name), name)


def parted(row):
    """The prompt of a pair and the row with its answers; a prompt that is not given is what both begin with, as TRL's extract_prompt finds it. So it is where
    the prompt is a string and the answers are conversations: these hold it."""
    answers = [row.get("chosen"), row.get("rejected")]
    talks = all(isinstance(answer, list) for answer in answers)
    if row.get("prompt") is not None and not (isinstance(row["prompt"], str) and talks):
        return row["prompt"], row
    if not (all(isinstance(answer, str) for answer in answers) or all(isinstance(answer, list) for answer in answers)):
        raise BadRow('has "chosen" and "rejected" that are neither two strings nor two lists of messages')
    shorter = min(map(len, answers))
    if shorter == 0:
        raise BadRow('has an empty "chosen" or "rejected"')
    end = next((at for at in range(shorter) if answers[0][at] != answers[1][at]), None)
    if end is None:
        end = shorter - 1  # an answer keeps what it ends with
    elif end > 0 and answers[0][end - 1] == " ":
        end -= 1
    return answers[0][:end], {**row, "chosen": answers[0][end:], "rejected": answers[1][end:]}


def batches(job):
    """Rows as they stand in the files, in groups; and how many bytes of the files are done then."""
    batch, characters, done = [], 0, 0
    for file in job["files"]:
        try:
            stream = open(file["path"], "rb")
        except OSError as error:
            raise Refusal(file["path"], f"cannot be read: {error.strerror}") from None
        with stream:
            for number, raw in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
                done += len(raw)
                if not raw.strip():
                    continue
                tasks = rows_of_line(f"{file['path']}:{number}", file["format"])
                batch += tasks
                characters += len(raw) * len(tasks)
                if len(raw) > LONGEST_LINE:
                    raise Refusal(tasks[0].where, f"is longer than {LONGEST_LINE >> 20} MiB")
                for task in tasks:
                    try:
                        fill(task, parse(raw), job, file["format"])
                    except BadRow as error:
                        task.error = error
                if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
                    yield batch, done
                    batch, characters = [], 0
    if batch:
        yield batch, done


def rows_of_line(where, format):
    if format != "preference":
        return [Row(where)]
    chosen, rejected = Row(where), Row(where)
    chosen.other, rejected.other, rejected.second = rejected, chosen, True
    return [chosen, rejected]
