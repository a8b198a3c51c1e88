"""Text to token ids on several processes, in the order of the text."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from lit_layers.data.tokenization import one_thread
from lit_layers.errors import InputError

Texts = list[tuple[str, str]]  # (split, text)
Encoded = dict[str, tuple[np.ndarray, np.ndarray]]  # split -> ids of its documents one after the other, their lengths
Item = TypeVar("Item")


class Encoder:
    """Encodes documents and closes each with the end of text, which never arises from the text itself."""

    def __init__(self, tokenizer: Path, end_of_text_id: int, dtype: np.dtype):
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self.end, self.dtype = end_of_text_id, dtype

    def __call__(self, texts: Texts) -> Encoded:
        with one_thread():
            found = self.tokenizer.encode_batch_fast([text for _, text in texts], add_special_tokens=False)
        pieces = {split: [] for split, _ in texts}
        for (split, _), encoding in zip(texts, found, strict=True):
            pieces[split].append(np.array([*encoding.ids, self.end], dtype=self.dtype))
        return {
            split: (np.concatenate(documents), np.array([len(ids) for ids in documents], dtype=np.int64))
            for split, documents in pieces.items()
        }


def encoded(
    items: Iterable[Item], texts: Callable[[Item], Texts], *, workers: int, tokenizer: Path, end: int, dtype: np.dtype
) -> Generator[tuple[Item, Encoded], None, None]:
    """Yields each item with its encoded texts, in order; only a few items are under way at any time."""
    if workers == 1:
        encoder = Encoder(tokenizer, end, dtype)
        for item in items:
            yield item, encoder(texts(item))
        return
    waiting: deque[tuple[Item, Future]] = deque()
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # fork is not safe beside torch's and tokenizers' threads
        initializer=_start,
        initargs=(tokenizer, end, dtype),
    )
    try:
        for item in items:
            with _starting():
                waiting.append((item, pool.submit(_encode, texts(item))))
            if len(waiting) > 2 * workers:
                item, future = waiting.popleft()
                yield item, future.result()
        while waiting:
            item, future = waiting.popleft()
            yield item, future.result()
    except BrokenProcessPool as error:
        raise InputError(f"one of {workers} workers died (out of memory?): run again with fewer to continue") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder | None = None  # of this worker process


def _start(tokenizer: Path, end: int, dtype: np.dtype) -> None:
    global _encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(tokenizer, end, dtype)


def _end_with_parent() -> None:
    """A worker whose parent was killed would otherwise wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(texts: Texts) -> Encoded:
    assert _encoder is not None
    return _encoder(texts)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """While a process may start: hides the main script, which it would run again and needs nothing of, and holds Ctrl-C
    back, which it would answer with a traceback (it inherits the mask; here the signal comes through afterwards)."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
