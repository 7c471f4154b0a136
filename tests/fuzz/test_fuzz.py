# SPDX-License-Identifier: Apache-2.0
"""The short, deterministic run of the fuzz targets: their seeds, the stored corpus, and mutations of both."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from targets import TARGETS, seeds

CORPUS = Path(__file__).resolve().parent / "corpus"


def stored(name: str) -> list[bytes]:
    folder = CORPUS / name
    return [file.read_bytes() for file in sorted(folder.iterdir())] if folder.is_dir() else []


def mutated(data: bytes, generator: random.Random) -> bytes:
    """One to four of: a byte changed, a bit flipped, a part cut out, repeated or overwritten with an extreme."""
    work = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(work) + 1)
        kind = generator.randrange(5)
        if kind == 0 and at < len(work):
            work[at] = generator.randrange(256)
        elif kind == 1 and at < len(work):
            work[at] ^= 1 << generator.randrange(8)
        elif kind == 2:
            del work[at : at + generator.randint(1, 40)]
        elif kind == 3:
            work[at:at] = work[at : at + generator.randint(1, 40)]
        else:
            extreme = generator.choice(
                [b"\xff" * 8, bytes(8), b"\x80\x7f", b"\x7f\xff\xff\xff", b"9" * 20, b"-1", b"[", b'"']
            )
            work[at : at + len(extreme)] = extreme
    return bytes(work)


@pytest.mark.parametrize("name", list(TARGETS))
def test_stored_inputs_and_mutations_find_nothing(name: str) -> None:
    target, generator = TARGETS[name], random.Random(name)
    inputs = [*seeds(name), *stored(name)]
    assert len(inputs) >= 3
    for data in inputs:
        target(data)
    stop = time.monotonic() + 2.0  # a slow machine does fewer; the order is the same
    for _ in range(300):
        data = mutated(generator.choice(inputs), generator)
        try:
            target(data)
        except BaseException:
            print(f"{name}: input {data[:4000]!r}")  # pytest shows it with the failure
            raise
        if time.monotonic() > stop:
            break


def test_every_corpus_folder_is_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir() if folder.is_dir()} <= set(TARGETS)
