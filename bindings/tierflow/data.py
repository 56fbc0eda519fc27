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
from .folders import expect_model_folder

IGNORED = -100
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")  # what would move a terminal's cursor


class Rows(torch.utils.data.Dataset):
    """Sequences of one length. Each is a dictionary of int64 tensors [sequence_length] as transformers' models take them: `input_ids`; `labels`, not shifted, -100 where a
    token is not trained on; and, if several rows share a sequence, `position_ids`, which begin anew with each row.

    files: a .tfd file, a folder that has one, or several files with `weights`, their shares of the sequences.
    vocab_size: of the model; a larger token id is an error.
    packing: "auto" and "bfd" pack several rows into a sequence, "none" pads, "concat" cuts. transformers' code of OPT, gpt-oss and models with recurrent layers does not
        keep packed rows apart; a streamed model of these raises UsageError: use "none".
    held_out: the share of the sequences that `held_out()` gives, and this object does not; the program's default is 0.01.
    seed: with the program's seed and held_out, the order is that of the program's first epoch, or of another one after set_epoch(). You may shuffle as you like.
    teacher: a file of write_teacher() or `tierflow eval --teacher-out` for these rows. Each sequence then also has `teacher_ids` int32 and `teacher_log_probabilities`
        fp16 [sequence_length, K]: the tokens that the teacher found most likely to follow each position (tierflow.losses.Distillation).

    When it is unpickled, as in a DataLoader's worker that is not forked, it opens the files again. Raises InputError if they have other rows by then.
    """

    _more: dict[str, Any] = {}

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
        teacher: str | os.PathLike | None = None,
    ) -> None:
        named = [files] if isinstance(files, (str, pathlib.Path)) else files
        found = [str(file) for path in map(pathlib.Path, named) for file in (sorted(path.glob("*.tfd")) if path.is_dir() else [path])]
        for file in found:
            if not file.endswith(".tfd"):
                raise _native.UsageError(f"{file} is no file of prepared rows: tierflow data prepare --model DIR --data {file} --out rows.tfd makes one")
        if not found:
            raise _native.InputError(f"{', '.join(map(str, named))} holds no .tfd file: tierflow data prepare --out rows.tfd makes one")
        how: dict[str, Any] = {"weights": list(weights), "packing": packing, "vocab_size": vocab_size, "sequence_length": sequence_length, "held_out": held_out, "seed": seed}
        how |= self._more
        self._native = _native.Dataset({"files": found, **how})
        self._made: dict[str, Any] = {"files": [os.path.abspath(file) for file in found], **how}
        self._held_out, self._epoch = False, 0
        self._tokenizer: Any = None  # that preview() uses
        self._teacher = None if teacher is None else os.path.abspath(teacher)
        self._teachers = self._open_teacher()

    def _open_teacher(self) -> Any:
        return None if self._teacher is None else _native.TeacherFile(self._teacher, self._native, self._made["vocab_size"])

    def held_out(self) -> "Rows":
        """The sequences that are kept for evaluation."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _held_out=True)
        return other

    @property
    def fingerprint(self) -> str:
        """A text that is equal if the sequences of every epoch are equal: it depends on the rows and on how they are packed, mixed and ordered. For tierflow.resume()."""
        return f"rows {self._native.fingerprint():016x}" + (", held out" if self._held_out else "")

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """How the rows became sequences, one dictionary for each mixed dataset, as `tierflow data prepare --json` prints it: examples, tokens, trained_tokens, truncated,
        dropped, bad_rows and other_files (those of kinds that are not read) and the first of each, how turns were found (masks), and a histogram of the examples' lengths."""
        return json.loads(self._native.summaries())

    def preview(self, count: int = 3, tokenizer: Any = None) -> str:
        """The first training sequences as text, with trained tokens between {+ and +}, as `tierflow data preview` prints them.

        tokenizer: a transformers tokenizer or a folder that has one; by default that of the model that prepare() was given.
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
        """From now on the sequences are those of the epoch with this number, from 0. If files are mixed, each epoch has other sequences of a file with a small share."""
        if epoch < 0:
            raise _native.UsageError(f"epochs are counted from 0, not {epoch}")
        self._epoch = epoch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_native", "_teachers")} | {"fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        then = state.pop("fingerprint")
        self.__dict__.update(state)
        self._native = _native.Dataset(self._made)
        if self.fingerprint != then:
            raise _native.InputError(f"{', '.join(self._made['files'])}: the rows there are others than those that were opened: open them again")
        self._teachers = self._open_teacher()

    def __len__(self) -> int:
        return self._native.held_out_sequences() if self._held_out else self._native.training_sequences()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} sequences")
        first = 0 if self._held_out else self._epoch * len(self)
        return {name: value[0] for name, value in self._batch(first + index, 1).items()}

    def _batch(self, first: int, rows: int) -> dict[str, torch.Tensor]:
        ids, predicted, positions = self._native.batch(self._held_out, first, rows)
        found = as_transformers(ids, predicted, positions)
        if self._teachers is not None:
            found["teacher_ids"], found["teacher_log_probabilities"] = self._teachers.batch(self._native, self._held_out, first, rows)
        return found


def as_transformers(ids: torch.Tensor, predicted: torch.Tensor, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The program's labels say what each position predicts, transformers' what stands there."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, 1:] = predicted[:, :-1]
    found = {"input_ids": ids, "labels": labels}
    return found if positions is None else {**found, "position_ids": positions}


class Pairs(Rows):
    """Pairs of a chosen and a rejected answer, from a .tfd file that `tierflow data prepare` made of such rows. Each is a dictionary of int64 tensors `input_ids` and
    `labels` [2, sequence_length], the chosen answer first. Labels count only in the answers. Padding follows an answer, so no token of it sees the padding. The
    arguments are those of Rows, without packing and teacher."""

    _more = {"pairs": True}

    def __init__(self, files: str | pathlib.Path | Sequence[str | pathlib.Path], *, vocab_size: int, sequence_length: int, weights: Sequence[float] = (), held_out: float = 0.0, seed: int = 0) -> None:
        super().__init__(files, vocab_size=vocab_size, sequence_length=sequence_length, weights=weights, held_out=held_out, seed=seed)

    def __len__(self) -> int:
        return super().__len__() // 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} pairs")
        first = 0 if self._held_out else self._epoch * len(self)
        return self._batch(2 * (first + index), 2)

    def preview(self, count: int = 3, tokenizer: Any = None) -> str:
        raise _native.UsageError("pairs are shown by `tierflow data preview`")


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
    """Prepares rows of conversations (.jsonl) as sequences for training, and opens them: `tierflow data prepare`, with its formats, rules and bytes (docs/data.md).

    model: a folder with config.json, tokenizer and chat template.
    out: a .tfd file to write, which Rows() and `tierflow train --data` take; by default the rows are only in the cache.
    chat_template: a file, or the text of a template, instead of the tokenizer's. on_bad_row: "error", or "skip", which leaves bad rows out and counts them.
    format: as --data-format. With "preference", for rows of a chosen and a rejected answer, the result is Pairs.
    progress: called with the phase, and how many of how many bytes are done. cache: as --data-cache. The other arguments are those of Rows.
    Returns Rows, which have `summaries` and preview(). Raises InputError, which names file, line and what is wrong with a row.
    """
    import transformers

    if on_bad_row not in ("error", "skip"):
        raise _native.UsageError(f'on_bad_row is "{on_bad_row}"; there are error, skip')
    if out is not None and not os.fspath(out).endswith(".tfd"):
        raise _native.UsageError(f"{out}: prepared rows are kept in a file that ends in .tfd")
    folder = pathlib.Path(model)
    expect_model_folder(folder)
    vocab_size = transformers.AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    tokenizer = folder / "tokenizer.json"
    named = [files] if isinstance(files, (str, os.PathLike)) else files
    how: dict[str, Any] = {"packing": packing, "weights": list(weights), "vocab_size": vocab_size, "sequence_length": sequence_length, "held_out": held_out, "seed": seed}
    if format == "preference":
        if packing not in ("auto", "none"):
            raise _native.UsageError(f'packing is "{packing}"; each answer of a pair is a sequence of its own: leave it out')
        how["pairs"] = True
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
    if how.pop("pairs", False):
        del how["packing"]
        return Pairs(kept if out is None else os.fspath(out), **how)
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


def write_teacher(trainer: Any, rows: Rows, out: str | os.PathLike, *, top: int = 64, batch: int = 4, at_once: int = 8, progress: Callable[[int, int], None] | None = None) -> None:
    """Writes the `top` tokens that the trainer's model finds most likely at each position of `rows` that counts, to a file for Rows(teacher=...) and `tierflow train
    --distill`.

    Forward only. It takes all sequences, held-out ones too, in micro-batches of `batch` sequences; `at_once` micro-batches pass each module before the next module is
    fetched. A temperature is applied later, by the loss. progress: called with how many of how many sequences are done. `out` appears when it is whole.
    """
    if rows._teacher is not None or rows._more:
        raise _native.UsageError("a teacher's file is made of rows that are neither pairs nor taught")
    native, count, eval_mode = rows._native, rows._native.all_sequences(), trainer.model.training
    writer = _native.TeacherWriter(os.fspath(out), native, top, rows._made["vocab_size"])

    def likely(model: Any, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ids, predicted, positions = given
        logits = model(input_ids=ids, **({} if positions is None else {"position_ids": positions})).logits
        found = []
        for row, label in zip(logits, predicted, strict=True):
            counted = row[label >= 0].double()
            # Of equal ones that with the lowest id comes first, as in the program's file.
            values, at = counted.sort(dim=-1, descending=True, stable=True)
            found.append((at[:, :top].int(), (values[:, :top] - counted.logsumexp(-1, keepdim=True)).clamp(max=0).half()))
        return found

    trainer.model.eval()
    try:
        for first in range(0, count, batch * at_once):
            parts = [native.numbered(at, min(batch, count - at)) for at in range(first, min(count, first + batch * at_once), batch)]
            for found in trainer.evaluate(parts, likely):
                for ids, values in found:
                    writer.add(ids, values)
            if progress is not None:
                progress(min(count, first + batch * at_once), count)
    finally:
        trainer.model.train(eval_mode)
    writer.finish()
