"""Tokenises text for the C++ side, which runs this text behind script_process.py with `python -I -c` and feeds it through a socket.

Usage: -c SCRIPT TOKENIZER_JSON. Everything is little-endian.

    first answer: b"TFTK", u32 size of the vocabulary, i32 id of the end-of-text token or -1
    request:      u32 number of pieces, then for each: u32 length (top bit set: a document ends here), UTF-8 bytes
    answer:       u32 number of tokens, then that many u32 ids; before each document what the tokenizer's post-processor adds at the beginning of a text (the
                  BOS token of Llama and Gemma), and after it the end-of-text token, if there is one and the document does not end with it

Ends at the end of its input. On failure: one line on standard error and exit status 3 (the tokenizer file), 4 (the machine).
"""
import array
import itertools
import json
import os
import struct
import sys

from tierflow.script_process import exit_status, one_line

LARGEST_FILE = 256 << 20


class Refusal(Exception):
    """The tokenizer's files are not what they claim to be."""


def read_exactly(stream, count):
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def load_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def end_of_text(tokenizer, folder):
    """The id that the files beside the tokenizer name, or None."""
    token = load_json(os.path.join(folder, "tokenizer_config.json")).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
        return tokenizer.token_to_id(token)
    for name in ("config.json", "generation_config.json"):
        number = load_json(os.path.join(folder, name)).get("eos_token_id")
        if isinstance(number, list) and number:
            number = number[0]
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31:
            return number
    return None


def load(path):
    from tokenizers import Tokenizer

    if os.path.getsize(path) > LARGEST_FILE:
        raise Refusal(f"is larger than {LARGEST_FILE >> 20} MiB")
    try:
        tokenizer = Tokenizer.from_file(path)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise Refusal(f"is not a tokenizer.json that the tokenizers library reads: {one_line(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_request(stream):
    (count,) = struct.unpack("<I", read_exactly(stream, 4))
    texts, ends = [], []
    for _ in range(count):
        (length,) = struct.unpack("<I", read_exactly(stream, 4))
        ends.append(bool(length >> 31))
        texts.append(read_exactly(stream, length & 0x7FFFFFFF).decode("utf-8"))
    return texts, ends


def beginning(tokenizer):
    """The ids that the tokenizer's post-processor puts before a text."""
    encoding = tokenizer.encode("a")
    return [id for id, _ in itertools.takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask))]


def serve(tokenizer, eos, requests, answers):
    answers.write(struct.pack("<4sIi", b"TFTK", tokenizer.get_vocab_size(), -1 if eos is None else eos))
    answers.flush()
    before, begins = None, True
    while True:
        try:
            texts, ends = read_request(requests)
        except EOFError:
            return
        ids = array.array("I")
        try:
            before = beginning(tokenizer) if before is None else before
            for encoding, end in zip(tokenizer.encode_batch_fast(texts, add_special_tokens=False), ends):
                if begins:
                    ids.extend(before)
                begins = end
                ids.extend(encoding.ids)
                if end and eos is not None and encoding.ids[-1:] != [eos]:
                    ids.append(eos)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise Refusal(f"fails on the text: {one_line(error)}") from None
        if sys.byteorder == "big":
            ids.byteswap()
        answers.write(struct.pack("<I", len(ids)))
        answers.write(ids.tobytes())
        answers.flush()


def main(path):
    try:
        tokenizer = load(path)
        serve(tokenizer, end_of_text(tokenizer, os.path.dirname(os.path.abspath(path))), sys.stdin.buffer, sys.stdout.buffer)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1]), "the Python package `tokenizers` (pip install tokenizers)"))
