"""Rows that `tierflow data prepare --out rows.tfd` wrote, packed into sequences as the program packs them."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from . import _native

IGNORED = -100


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
        how = (list(weights), packing, vocab_size, sequence_length, held_out, seed)
        self._native = _native.Dataset(found, *how)
        self._made = ([os.path.abspath(file) for file in found], *how)
        self._held_out, self._epoch = False, 0

    def held_out(self) -> "Rows":
        """The sequences that are kept for evaluation."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _held_out=True, _epoch=0)
        return other

    @property
    def fingerprint(self) -> str:
        """Equal where the sequences of every epoch are: the rows and what packs, mixes and orders them. tierflow.resume(data=rows) keeps it."""
        return f"rows {self._native.fingerprint():016x}" + (", held out" if self._held_out else "")

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
        self._native = _native.Dataset(*self._made)
        if self.fingerprint != then:
            raise _native.InputError(f"{', '.join(self._made[0])}: the rows there are others than those that were opened: open them again")

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
