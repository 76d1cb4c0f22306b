"""The demonstration's tokenizer: byte-level BPE with digits one by one, and the release's control tokens and split."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tools.checkpoint.tokenizer_json import SPLIT
from tools.demo.control import CONTROL_TOKENS, PLAIN


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer of at most ``size`` ids: the bytes and merges first, then the control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=text not in PLAIN, normalized=False) for text in CONTROL_TOKENS])
    return tokenizer


def control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
