"""Log-probabilities as OpenAI gives them: of the raw logits, over the ids that have text, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mimo_vk.formats import F32
from mimo_vk.sampling import log_softmax
from mimo_vk.tokenizer import Tokenizer


@dataclass(frozen=True)
class Scored:
    """A token and its log-probability (None: minus infinity). ``text`` as ``token_text`` gives it."""

    text: str
    bytes: bytes
    logprob: float | None


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was chosen or read, with the likeliest ones in its place, itself always among them.

    predicted: False for the first token of a prompt, which nothing came before.
    """

    token: Scored
    top: tuple[Scored, ...]
    predicted: bool = True


def token_text(data: bytes) -> str:
    r"""A token's bytes as text; where they are no UTF-8 (a part of a character), in the form ``bytes:\xe2\x80``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def score(row: F32, token: int, top: int, limit: int, tokenizer: Tokenizer) -> TokenLogprob:
    """The entry of ``token`` by its raw logits [V]; ``top`` alternatives, best first, and the token if not in them."""
    logprobs = log_softmax(row, limit)
    ids = best(logprobs, top)
    if top and token not in ids:
        ids.append(token)

    def scored(token_id: int) -> Scored:
        data = tokenizer.token_bytes(token_id)
        value = float(logprobs[token_id]) if token_id < limit else -math.inf
        return Scored(token_text(data), data, value if math.isfinite(value) else None)

    return TokenLogprob(scored(token), tuple(map(scored, ids)))


def best(logprobs: np.ndarray[Any, Any], count: int) -> list[int]:
    """The ids of the largest, best first, the lower id first among equals."""
    count = min(count, len(logprobs))
    if not count:
        return []
    floor = np.partition(logprobs, -count)[-count]
    ids = np.flatnonzero(logprobs >= floor)
    return [int(i) for i in ids[np.argsort(-logprobs[ids], kind="stable")][:count]]


def chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    """The form of chat completions."""
    return {**_chat_token(entry.token), "top_logprobs": [_chat_token(token) for token in entry.top]}


def _chat_token(token: Scored) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
