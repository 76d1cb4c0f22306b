"""Token ids to text and back: byte-level BPE from a checkpoint's tokenizer.json.

Control tokens (``<|im_start|>``, ``<think>``, ``<tool_call>``...) are the added tokens that begin with a punctuation
mark. They count only where the caller says so: ``encode`` of a user's text never makes one, and in a rendered chat
they come from the template alone. What users wrote passes through the template with the first and last characters of
all control tokens replaced by private-use characters (``escape``), which ``encode_rendered`` turns back after it has
cut the text at the real tokens; so no text of a user's, nor two joined ones, can complete a token.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from mimo_vk.errors import CheckpointError, UsageError

_FIRST_ESCAPE = 0x10F800  # plane 16, private use: no text means anything by it
_JSON_SYNTAX = '"\\'  # these can't be escaped: JSON writes them differently from what they are
_MAX_ESCAPES = 512


class Escapes:
    """A reversible marking of characters: character i of ``chars`` becomes one private-use character.

    Private-use characters that the text already holds are doubled behind a quote character, so every text survives.
    """

    def __init__(self, chars: Iterable[str]) -> None:
        ordered = sorted(set(chars))
        assert len(ordered) < _MAX_ESCAPES
        codes = [chr(_FIRST_ESCAPE + i) for i in range(len(ordered))]
        self.quote = chr(_FIRST_ESCAPE + len(ordered))
        self._table = {ord(char): code for char, code in zip(ordered, codes, strict=True)}
        self._table |= {ord(code): self.quote + code for code in [*codes, self.quote]}
        self._original = dict(zip(codes, ordered, strict=True))
        self._marked = re.compile(f"{self.quote}(.)|[{''.join(codes)}]" if codes else f"{self.quote}(.)")
        self._ascii = re.compile(f"{self.quote}.|[^\\x00-\\x7e]")

    def escape(self, text: str) -> str:
        return text.translate(self._table)

    def unescape(self, text: str) -> str:
        return self._marked.sub(lambda match: match[1] or self._original[match[0]], text)

    def ascii_json(self, text: str) -> str:
        r"""JSON text with every character beyond printable ASCII as \uXXXX, except the marks themselves."""

        def written(match: re.Match[str]) -> str:
            return match[0] if match[0] in self._original else json.dumps(match[0][-1])[1:-1]

        return self._ascii.sub(written, text)


LONG = 10_000  # characters: only a batch is read without keeping other threads waiting, for seconds where it is long


@dataclass(frozen=True)
class AddedToken:
    """An added token as tokenizer.json declares it; lstrip and rstrip swallow the white space beside it."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool


class _Splitter:
    """Finds added tokens in a text: the leftmost, then the longest, as the tokenizers package does."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        ordered = sorted(added, key=lambda token: -len(token.text))
        self._ids = {token.text: token.id for token in ordered}
        self._pattern = re.compile(_either(ordered))

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, token id) of each, in order."""
        for match in self._pattern.finditer(text):
            assert match.lastindex is not None
            yield match.start(), match.end(), self._ids[match[match.lastindex]]


def _either(tokens: list[AddedToken]) -> str:
    """A pattern of any of the tokens, its text in a group.

    One group for all where they are alike: 32 groups take a hundred times as long over a text that has none of them,
    and nothing else runs in this process meanwhile.
    """
    if any(token.lstrip or token.rstrip for token in tokens):
        return "|".join(map(_pattern, tokens))
    return f"({'|'.join(re.escape(token.text) for token in tokens)})" if tokens else "(?!)"


def _pattern(token: AddedToken) -> str:
    return (r"\s*" if token.lstrip else "") + f"({re.escape(token.text)})" + (r"\s*" if token.rstrip else "")


class TextStream:
    """Ids pushed one at a time to text, never half a character; constant work per id."""

    def __init__(self, tokenizer: Tokenizer, dropped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._dropped = dropped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while a character is unfinished."""
        if token_id in self._dropped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The end: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """See the module. ``size`` is the highest id + 1; ``control`` the control tokens by their text."""

    def __init__(self, content: bytes, name: str) -> None:
        data = _parsed(content, name)
        added = [_added_token(token) for token in data.get("added_tokens") or []]
        self.control = {token.text: token for token in added if _can_mark(token.text[0])}
        self._added = {token.text: token for token in added}
        try:
            self._plain = _without_added(tokenizers.Tokenizer.from_buffer(content))
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{name}: {_one_line(error)}") from None
        self.size = max([*data["model"]["vocab"].values(), *(token.id for token in added)]) + 1
        self.escapes = Escapes(mark for text in self.control for mark in (text[0], text[-1]) if _can_mark(mark))
        self._bytes: dict[int, bytes] = {token.id: token.text.encode() for token in added}
        self._all_added = _Splitter(added)
        self._words = _Splitter(token for token in added if token.text not in self.control)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read ``tokenizer.json``. CheckpointError where it is missing, unreadable, or not byte-level."""
        path = model_dir / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        return cls(content, str(path))

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact text (control tokens too), or None."""
        if text in self._added:
            return self._added[text].id
        found = self._plain.token_to_id(text)
        return None if found is None else int(found)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Text to ids. special: control tokens written in the text count; otherwise they are plain text."""
        return self._split(text, self._all_added if special else self._words)

    def encode_rendered(self, text_with_escapes: str) -> list[int]:
        """A rendered chat to ids: control tokens count, except where ``escapes`` marked a user's characters."""
        return self._split(text_with_escapes, self._all_added, self.escapes)

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Ids to text, the same as a stream's joined text. Bytes that are no UTF-8 become U+FFFD."""
        dropped = frozenset() if keep_special else self._special_ids
        joined = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in dropped)
        return joined.decode("utf-8", "replace")

    def stream(self, keep_special: bool = False, keep: Iterable[str] = ()) -> TextStream:
        """A TextStream. Tokens declared special are left out, but for all (keep_special) or those in ``keep``."""
        kept = {self.control[text].id for text in keep if text in self.control}
        return TextStream(self, frozenset() if keep_special else self._special_ids - kept)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: b"" for an id that no token has."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._plain.id_to_token(token_id) if 0 <= token_id < self.size else None
            found = self._bytes[token_id] = _piece_bytes(piece or "")
        return found

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(token.id for token in self.control.values() if token.special)

    def _split(self, text: str, added: _Splitter, escapes: Escapes | None = None) -> list[int]:
        """Ids of a text cut at added tokens. Only between them are escapes undone."""
        ids: list[int] = []
        start = 0
        for at, end, token_id in added.find(text):
            ids += self._encode_plain(text[start:at], escapes)
            ids.append(token_id)
            start = end
        return ids + self._encode_plain(text[start:], escapes)

    def _encode_plain(self, text: str, escapes: Escapes | None) -> list[int]:
        if escapes:
            return self._split(escapes.unescape(text), self._words)
        if not text:
            return []
        try:
            if len(text) < LONG:
                return list(self._plain.encode(text, add_special_tokens=False).ids)
            return list(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except (UnicodeEncodeError, TypeError):
            raise UsageError(f"the text is not valid Unicode: {lone_surrogate(text)}") from None


def lone_surrogate(text: str) -> str | None:
    """Where a text holds half a surrogate pair (no UTF-8 exists for it), in words; None if nowhere."""
    found = re.search("[\ud800-\udfff]", text)
    return found and f"a lone surrogate U+{ord(found[0]):04X} at character {found.start()}"


def _can_mark(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char in _JSON_SYNTAX or char == "_")


def _parsed(content: bytes, name: str) -> dict[str, Any]:
    """The file's object, checked where this module reads it; the tokenizers package checks the rest."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{name}: expected a JSON object, found {type(data).__name__}")
    decoder, model = data.get("decoder"), data.get("model")
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    if kind != "ByteLevel":
        raise CheckpointError(f"{name}: decoder.type: expected ByteLevel, found {kind}")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not (isinstance(vocab, dict) and vocab):
        raise CheckpointError(f"{name}: model.vocab: expected an object of tokens, found {type(vocab).__name__}")
    added = data.get("added_tokens") or []
    if not isinstance(added, list):
        raise CheckpointError(f"{name}: added_tokens: expected a list, found {type(added).__name__}")
    for i, token in enumerate(added):
        text, token_id = (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        if not (isinstance(text, str) and text and isinstance(token_id, int) and token_id >= 0):
            raise CheckpointError(f"{name}: added_tokens[{i}]: expected an object with an id and a content")
    return data


def _without_added(package: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same model without added tokens, truncation, padding, or tokens put around a text.

    The package numbers added tokens by itself as it reads them, so all of them are handled here, by the file's ids.
    """
    plain = tokenizers.Tokenizer(package.model)
    if package.normalizer is not None:
        plain.normalizer = package.normalizer
    if package.pre_tokenizer is not None:
        plain.pre_tokenizer = package.pre_tokenizer
    return plain


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the other 68 for the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _piece_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:  # a word outside the alphabet stands for itself
        return piece.encode()


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    flags = (bool(token.get(flag, False)) for flag in ("special", "lstrip", "rstrip"))
    return AddedToken(int(token["id"]), token["content"], *flags)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
