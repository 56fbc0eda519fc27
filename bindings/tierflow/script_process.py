"""What the Python processes of the program share: how they answer, and how they end. The program runs this text ahead of each of its scripts.

A frame to the C++ side is u8 kind, u32 length, payload; a request u32 length, JSON; little-endian.
"""
import json
import struct
import sys


def one_line(error, limit=300):
    text = " ".join(str(error).split())
    return text[:limit] or type(error).__name__


def send(stream, kind, payload):
    stream.write(struct.pack("<BI", ord(kind), len(payload)) + payload)
    stream.flush()


def send_json(stream, kind, value):
    send(stream, kind, json.dumps(value).encode())


def read_json(stream):
    """The next request; None at the end of the input."""
    head = stream.read(4)
    if len(head) != 4:
        return None
    (length,) = struct.unpack("<I", head)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def volunteer_for_the_oom_killer():
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass


def exit_status(work, package):
    """That of work(), or 4 and one line on standard error where the machine is at fault. package: what work() needs, and how it is installed."""
    volunteer_for_the_oom_killer()
    try:
        return work()
    except ImportError as error:
        print(f"lacks {package}: {one_line(error)}", file=sys.stderr)
    except (OSError, MemoryError) as error:
        print(one_line(error), file=sys.stderr)
    return 4
