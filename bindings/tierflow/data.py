"""Rows of conversations: prepared as `tierflow data prepare` prepares them, and packed into sequences as the program packs them."""

import contextlib
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import _native

IGNORED = -100
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")  # what would move a terminal's cursor


class Rows(torch.utils.data.Dataset):
    """Sequences of one length, each a dictionary of int64 tensors [sequence_length] as transformers' models take them: `input_ids`; `labels`, not
    shifted, -100 where a token is not trained on; and, where several rows share a sequence, `position_ids`, which begin anew with each row.

    files: a .tfd file, a folder that holds one, or several files with `weights`, their shares of the sequences. vocab_size: of the model; a larger id
    is an error. packing: "auto" and "bfd" pack several rows a sequence, "none" pads, "concat" cuts; transformers' code of OPT, gpt-oss and models with recurrent
    layers does not keep packed rows apart, and a streamed one of them raises UsageError: give it "none". held_out: the share of the sequences that
    `held_out()` gives, and this does not; the program's default is 0.01. With the same seed and held_out the order is the program's: of its first epoch,
    or of another after set_epoch(). Shuffle as you like.

    A pickled one, as a DataLoader's worker gets it that is no fork, opens the files again. Raises InputError where they have other rows by then.
    """

    def __init__(
        self,
        files: str | pathlib.Path | Sequence[str | pathlib.Path],
        *,
        vocab_size: int,
        sequence_length: int,
        packing: str = "auto",
        weights: Sequence[float] = (),
        held_out: float = 0.0,
        seed: int = 0,
    ) -> None:
        named = [files] if isinstance(files, (str, pathlib.Path)) else files
        found = [str(file) for path in map(pathlib.Path, named) for file in (sorted(path.glob("*.tfd")) if path.is_dir() else [path])]
        for file in found:
            if not file.endswith(".tfd"):
                raise _native.UsageError(f"{file} is no file of prepared rows: tierflow data prepare --model DIR --data {file} --out rows.tfd makes one")
        if not found:
            raise _native.InputError(f"{', '.join(map(str, named))} holds no .tfd file: tierflow data prepare --out rows.tfd makes one")
        how: dict[str, Any] = {"weights": list(weights), "packing": packing, "vocab_size": vocab_size, "sequence_length": sequence_length, "held_out": held_out, "seed": seed}
        self._native = _native.Dataset({"files": found, **how})
        self._made: dict[str, Any] = {"files": [os.path.abspath(file) for file in found], **how}
        self._held_out, self._epoch = False, 0
        self._tokenizer: Any = None  # that preview() uses

    def held_out(self) -> "Rows":
        """The sequences that are kept for evaluation."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _held_out=True, _epoch=0)
        return other

    @property
    def fingerprint(self) -> str:
        """Equal where the sequences of every epoch are: the rows and what packs, mixes and orders them. tierflow.resume(data=rows) keeps it."""
        return f"rows {self._native.fingerprint():016x}" + (", held out" if self._held_out else "")

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """What became of the rows, for each dataset that is mixed, or for the one: what `tierflow data prepare --json` prints. examples, tokens, trained_tokens,
        truncated, dropped, bad_rows and the first of them, how turns were found (masks), and a histogram of the examples' lengths."""
        return json.loads(self._native.summaries())

    def preview(self, count: int = 3, tokenizer: Any = None) -> str:
        """The first sequences of training as text, what is trained on between {+ and +}: what `tierflow data preview` prints.

        tokenizer: a transformers tokenizer or a folder of one; left out, that of the model which prepare() named.
        """
        tokenizer = self._tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise _native.UsageError("preview() needs the tokenizer that the rows were prepared with: preview(tokenizer='path/to/model')")
        if isinstance(tokenizer, (str, os.PathLike)):
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        first = 0 if self._held_out else self._epoch * len(self)
        shown = [self._shown(self[at], None if self._held_out else self._native.training_tokens(first + at), tokenizer) for at in range(min(count, len(self)))]
        return "\n".join(f"=== sequence {number}: {text}" for number, text in enumerate(shown, 1))

    @staticmethod
    def _shown(row: dict[str, torch.Tensor], tokens: int | None, tokenizer: Any) -> str:
        ids, labels = row["input_ids"][:tokens].tolist(), row["labels"].tolist()
        positions = row["position_ids"].tolist() if "position_ids" in row else [1] * len(ids)
        runs: list[tuple[bool, bool, list[int]]] = []  # whether a document begins, whether it counts, ids
        for at, token in enumerate(ids):
            begins, trained = at > 0 and positions[at] == 0, labels[at] != IGNORED
            if at == 0 or begins or trained != runs[-1][1]:
                runs.append((begins, trained, []))
            runs[-1][2].append(token)
        trained, documents = sum(len(own) for _, counts, own in runs if counts), 1 + sum(begins for begins, _, _ in runs)
        text = f"{len(ids)} tokens, {trained} trained" + (f", {documents} documents" if documents > 1 else "") + "\n"
        for begins, counts, own in runs:
            piece = tokenizer.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            piece = CONTROL.sub("?", piece)
            text += ("\n--- next document\n" if begins else "") + (f"{{+{piece}+}}" if counts else piece)
        return text + "\n"

    def set_epoch(self, epoch: int) -> None:
        """From now on the sequences are those of the epoch with this number, from 0. Of a file with a small share of the mixture each epoch has others."""
        if epoch < 0:
            raise _native.UsageError(f"epochs are counted from 0, not {epoch}")
        self._epoch = epoch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_native"} | {"fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        then = state.pop("fingerprint")
        self.__dict__.update(state)
        self._native = _native.Dataset(self._made)
        if self.fingerprint != then:
            raise _native.InputError(f"{', '.join(self._made['files'])}: the rows there are others than those that were opened: open them again")

    def __len__(self) -> int:
        return self._native.held_out_sequences() if self._held_out else self._native.training_sequences()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} sequences")
        first = 0 if self._held_out else self._epoch * len(self)
        ids, predicted, positions = self._native.batch(self._held_out, first + index, 1)
        labels = torch.full_like(ids, IGNORED)
        labels[:, 1:] = predicted[:, :-1]  # the program's say what each position predicts, transformers' what stands there
        row = {"input_ids": ids[0], "labels": labels[0]}
        return row if positions is None else {**row, "position_ids": positions[0]}


def prepare(
    model: str | os.PathLike,
    files: str | os.PathLike | Sequence[str | os.PathLike],
    out: str | os.PathLike | None = None,
    *,
    train_on: str = "assistant",
    format: str = "auto",
    chat_template: str | os.PathLike | None = None,
    on_bad_row: str = "error",
    progress: Callable[[str, int, int], None] | None = None,
    cache: str | os.PathLike | None = None,
    sequence_length: int = 512,
    packing: str = "auto",
    weights: Sequence[float] = (),
    held_out: float = 0.0,
    seed: int = 0,
) -> Rows:
    """Rows of conversations (.jsonl) as sequences for training: `tierflow data prepare`, with its formats, its rules and its bytes (docs/data.md).

    model: a folder with config.json, tokenizer and chat template. out: a .tfd file to write, which Rows() and `tierflow train --data` take; left out, the
    rows stay in the cache alone. chat_template: a file, or the text of a template, in place of the tokenizer's. on_bad_row: "error", or "skip" counts them.
    progress: hears of each phase how many bytes are done, and how many there are. cache: as --data-cache. The others are those of Rows, which has the
    `summaries` of what was prepared, and a preview(). Raises InputError naming file, line and what is wrong with a row.
    """
    import transformers

    if on_bad_row not in ("error", "skip"):
        raise _native.UsageError(f'on_bad_row is "{on_bad_row}"; there are error, skip')
    if out is not None and not os.fspath(out).endswith(".tfd"):
        raise _native.UsageError(f"{out}: prepared rows are kept in a file that ends in .tfd")
    folder = pathlib.Path(model)
    if not (folder / "config.json").is_file():
        raise _native.InputError(f"{folder}: no config.json there")
    vocab_size = transformers.AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    tokenizer = folder / "tokenizer.json"
    named = [files] if isinstance(files, (str, os.PathLike)) else files
    how: dict[str, Any] = {"packing": packing, "weights": list(weights), "vocab_size": vocab_size, "sequence_length": sequence_length, "held_out": held_out, "seed": seed}
    with _template_file(chat_template) as template:
        made = _native.Dataset(
            {"files": [os.fspath(file) for file in named], "tokenizer": str(tokenizer) if tokenizer.exists() else "", "python": sys.executable, "train_on": train_on,
             "format": format, "chat_template": template, "skip": on_bad_row == "skip", "cache": os.fspath(cache or ""), **how},
            progress,
        )  # fmt: skip
    if out is not None:
        made.write_rows(os.fspath(out))
    kept = [one.get("prepared") for one in json.loads(made.summaries())]
    if None in kept:
        raise _native.UsageError(f"{named[kept.index(None)]} holds text, which has no rows: tierflow train --data takes it as it is")
    rows = Rows(kept if out is None else os.fspath(out), **how)
    rows._tokenizer = str(folder)
    return rows


@contextlib.contextmanager
def _template_file(template: str | os.PathLike | None) -> Iterator[str]:
    """The file that holds a template: the one that is named, or one with the text that is given."""
    if template is None or not any(begin in os.fspath(template) for begin in ("{{", "{%")):
        yield os.fspath(template or "")
        return
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", encoding="utf-8") as file:
        file.write(os.fspath(template))
        file.flush()
        yield file.name
