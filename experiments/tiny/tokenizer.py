"""The tokenizer of the models: byte-level BPE in which a word and the space before it are one token."""

import pathlib

from tokenizers import Tokenizer

from experiments.pretrain.corpus import save_tokenizer, train_tokenizer
from specjax.tasks import CHAT_TEMPLATE, TURN_TOKENS, Mixture

END, PAD, MASK = TURN_TOKENS[-1], "<|pad|>", "<|mask|>"
SPECIAL = {"end": END, "pad": PAD, "mask": MASK}
SPLIT = r" ?[^\W\d_]+| ?\d| ?[^\s\w]+| ?_+|\n+|\s"
"""A word or a sign keeps one space before it, and every digit stands alone."""


def train(vocab_size: int, questions: int, seed: int) -> Tokenizer:
    """A tokenizer for the text of so many training questions."""
    mixture = Mixture(seed)
    texts = (f" {part}" for i in range(questions) for part in (mixture[i].prompt, mixture[i].answers[0]))
    return train_tokenizer(texts, vocab_size, SPLIT, (PAD, MASK, *TURN_TOKENS))


def save(tokenizer: Tokenizer, folder: pathlib.Path, max_length: int) -> None:
    """Writes the files that `transformers.AutoTokenizer` reads."""
    named = {"eos_token": END, "pad_token": PAD, "mask_token": MASK}
    save_tokenizer(tokenizer, folder, max_length, chat_template=CHAT_TEMPLATE, **named)
