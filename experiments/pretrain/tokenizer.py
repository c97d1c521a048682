"""The tokenizer of the models: byte-level BPE in which a word and the space before it are one token."""

import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.tasks import CHAT_TEMPLATE, TURN_TOKENS, Mixture

END, PAD, MASK = TURN_TOKENS[-1], "<|pad|>", "<|mask|>"
SPECIAL = {"end": END, "pad": PAD, "mask": MASK}
SPLIT = r" ?[^\W\d_]+| ?\d| ?[^\s\w]+| ?_+|\n+|\s"
"""A word or a sign keeps one space before it, and every digit stands alone."""


def train(vocab_size: int, questions: int, seed: int) -> Tokenizer:
    """A tokenizer for the text of so many training questions, which gives back every text exactly."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, MASK, *TURN_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    mixture = Mixture(seed)
    texts = (f" {part}" for i in range(questions) for part in (mixture[i].prompt, mixture[i].answers[0]))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: pathlib.Path, max_length: int) -> None:
    """Writes the files that `transformers.AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
