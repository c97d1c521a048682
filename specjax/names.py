"""Unknown names of functions and commands: what another system's name is called here, or which known name is close.

Imports only the standard library and names, because the command line is checked before jax is imported.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from specjax.sampling_fields import SamplingFields

Function = TypeVar("Function", bound=Callable)

_DRAFT, _HEAD, _LENGTH = "such as draft:model=FOLDER", "such as eagle3:model=FOLDER", "such as prompt_lookup:length=8"
_POSITIONS = "in positions, where its rope depends on them; buffers follow the prompts"
MEANT: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens_to_sample", "max_gen_toks", "max_gen_len",
         "n_predict", "num_predict", "--predict", "-n"),
        ("max_new_tokens", ""),
    ),
    "min_tokens": ("min_new_tokens", ""),
    "max_length": ("max_new_tokens", "without the prompt's"),
    **dict.fromkeys(("n", "num_samples", "num_completions", "best_of"), ("num_return_sequences", "")),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "stop_sequence", "reverse_prompt"), ("stop", "")),
    "temp": ("temperature", ""),
    "do_sample": ("temperature", "and 0 is greedy"),
    **dict.fromkeys(("random_seed", "manual_seed", "sampling_seed", "random_state", "-s"), ("seed", "")),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), ("repetition_penalty", "")),
    "typical": ("typical_p", ""),
    "mirostat_lr": ("mirostat_eta", ""),
    "mirostat_ent": ("mirostat_tau", ""),
    "dry_sequence_breaker": ("dry_sequence_breakers", "a list"),
    **dict.fromkeys(
        ("assistant_model", "speculative_model", "speculative_draft_model_path", "draft_model", "model_draft", "-md"),
        ("drafter", _DRAFT),
    ),
    **dict.fromkeys(
        ("num_speculative_tokens", "num_assistant_tokens", "num_draft_tokens", "draft_max", "draft_n", "speculative_num_steps"),
        ("drafter", _LENGTH),
    ),
    **dict.fromkeys(("prompt_lookup_num_tokens", "ngram_prompt_lookup_max"), ("drafter", _LENGTH)),
    **dict.fromkeys(("speculative_config", "speculative_algorithm", "speculative_method"), ("drafter", _HEAD)),
    **dict.fromkeys(("tensor_parallel_size", "tp_size", "tp", "tensor_parallel"), ("mesh", "such as model=2")),
    **dict.fromkeys(("data_parallel_size", "dp_size", "dp"), ("mesh", "such as data=2")),
    **dict.fromkeys(("torch_dtype", "param_dtype", "precision"), ("dtype", "")),
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k", "cache_type_v", "kv_bits"), ("cache_dtype", "such as int8")),
    **dict.fromkeys(("quantization", "quantization_config", "load_in_8bit", "quantize"), ("weights", "such as int8")),
    "load_in_4bit": ("weights", "such as int4"),
    **dict.fromkeys(
        ("model_path", "model_id", "model_name", "model_name_or_path", "pretrained_model_name_or_path", "hf_repo", "-m"),
        ("model", ""),
    ),
    **dict.fromkeys(("lora", "lora_path", "lora_paths", "adapter_path", "peft_model"), ("adapter", "")),
    **dict.fromkeys(
        ("max_model_len", "context_length", "ctx_size", "n_ctx", "num_ctx", "max_seq_len", "max_seq_length", "-c"),
        ("longest", _POSITIONS),
    ),
    **dict.fromkeys(("max_num_seqs", "max_running_requests", "parallel", "num_seqs"), ("batch_size", "")),
    **dict.fromkeys(("apply_chat_template", "conversation", "chat_template"), ("chat", "")),
    **dict.fromkeys(("prompt", "inputs", "input_ids", "prompt_token_ids", "text", "messages", "-p"), ("prompts", "")),
    "target_model": ("target", ""),
    **dict.fromkeys(("file", "input_file", "prompt_file", "-f"), ("input", "")),
    **dict.fromkeys(("output_file", "out", "-o"), ("output", "")),
}  # fmt: skip
"""By a name of transformers, vLLM, SGLang, llama.cpp, MLX or Ollama: our name, and what to add. Not every function has
our name.
"""
WITHIN: dict[str, tuple[str, str]] = {
    "verifier": ("drafter", "such as eagle3:verifier=typical"),
    **dict.fromkeys(("unmask", "remasking"), ("decode", "such as threshold:threshold=0.9")),
    "cache": ("decode", "such as threshold:cache=dual"),
    **dict.fromkeys(("block_length", "sub_block", "align", "shift"), ("decode", "such as diffusion:{name}=...")),
    "block_size": ("decode", "such as diffusion:block_length=32"),
    "cfg_scale": ("decode", "such as diffusion:guidance=1.5"),
    "logits_eos_inf": ("decode", "such as diffusion:ends=never"),
    "confidence_eos_eot_inf": ("decode", "such as diffusion:ends=doubted"),
    "filter": ("decode", "such as learn2pd:model=FOLDER"),
    **dict.fromkeys(("num_beams", "beam_width", "use_beam_search"), ("decode", "such as beam:num_beams=4")),
    **dict.fromkeys(("length_penalty", "early_stopping"), ("decode", "such as beam:num_beams=4,{name}=...")),
    **dict.fromkeys(("num_beam_groups", "diversity_penalty"), ("decode", "such as diverse_beam:{name}=...")),
    "guidance_scale": ("decode", "such as plain:steer=(guidance:scale=1.5)"),
    "negative_prompt": ("decode", 'such as plain:steer=(guidance:negative_prompt="TEXT")'),
    "amateur": ("decode", "such as plain:steer=(contrastive:amateur=MODEL)"),
    **dict.fromkeys(
        ("contrast_alpha", "penalty_alpha"), ("decode", "such as plain:steer=(contrastive:amateur=MODEL,alpha=0.1)")
    ),
    "contrast_beta": ("decode", "such as plain:steer=(contrastive:amateur=MODEL,beta=0.5)"),
    "dola_layers": ("decode", "such as plain:steer=(dola:layers=low)"),
    "stochastic_beams": ("decode", "such as stochastic_beam:stochastic_beams=4"),
    **dict.fromkeys(
        ("superposed_drafts", "superposed_tokens", "superposed_temperature", "superposed_alpha", "superposed_ngrams"),
        ("decode", "such as superposed:{name}=..."),
    ),
    "soft_thinking": ("decode", "such as gumbel:n=8"),
    "end_of_think": ("decode", "such as gumbel:end_of_think=</think>"),
    **dict.fromkeys(
        ("logits_processors", "logits_processor"), ("decode", "such as specjax.decode.Speculate(processors=(...,))")
    ),
    **dict.fromkeys(
        ("adapter", "longest", "weights", "cache_dtype", "reduce_dtype", "revision", "config"),
        ("model", "such as specjax.load(..., {name}=...)"),
    ),
    "suffix": ("prompts", 'such as {"prompt": ..., "suffix": ...}'),
    "answer": ("select", "such as majority:answer=REGEX"),
    "prompt_logprobs": ("logprobs", 'as logprobs="prompt"'),
    **dict.fromkeys(SamplingFields.__dataclass_fields__, ("sampling", "such as {sampling}")),
    "ignore_eos": ("sampling", "such as {sampling}"),
}  # fmt: skip
"""By the name of an option, here or elsewhere: the option here that contains it, and an example."""
ELSEWHERE = {
    "shared_prefix": "Engine.run(shared_prefix=True) has it, and the command `specjax generate`",
    "prefix_cache": "specjax.Engine(prefix_cache=...) has it, and the command `specjax generate`",
    "stop": "a request has it, such as Engine.request(..., stop=...)",
    "ignore_eos": "a request has it, such as Engine.request(..., ignore_eos=True)",
}
"""By the name of an option that a function lacks: where to find it."""


def hint(name: str, known: Mapping[str, str]) -> str:
    """What an unknown name means, or which known name is close to it; empty if neither is found.

    Args:
      name: a keyword, or a flag with or without its dashes.
      known: by known name, how it reads to the user.
    """
    plain = name.lstrip("-").replace("-", "_")
    ours, more = MEANT.get(name if name in MEANT else plain, ("", ""))
    if ours in known:
        return f"it is {known[ours]} here" + (f", {more}" if more else "")
    plain = ours if ours in WITHIN else plain
    place, example = WITHIN.get(plain, ("", ""))
    if place in known:
        own = known[place]
        sampling = f"{own} {plain}=..." if own.startswith("-") else f"Sampling({plain}=...)"
        return f"it is in {own} here, " + example.replace("{name}", plain).replace("{sampling}", sampling)
    if plain in ELSEWHERE:
        return ELSEWHERE[plain]
    near = difflib.get_close_matches(plain, known, 1)
    return f"did you mean {known[near[0]]}?" if near else ""


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for a keyword that a function does not have, and says what it is called here."""
    known = dict.fromkeys(known)
    for name in given:
        if name not in known:
            said = hint(name, {own: own for own in known})
            raise TypeError(f"{function}() has no keyword {name!r}: {said or f'see help({function})'}")


def named(function: Function) -> Function:
    """Makes a function's unknown keywords raise the error of `check_keywords`."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known.keys():
            check_keywords(function.__qualname__.removesuffix(".__init__"), kwargs, known)
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def unrecognized(flag: str, known: Iterable[str]) -> str:
    """The message for a flag that a command does not have.

    Args:
      flag: as the user wrote it, such as `--max-tokens`.
      known: the command's flags, and its arguments by their names.
    """
    shown = {
        word.lstrip("-").replace("-", "_"): word if word.startswith("-") else f"the argument {word}" for word in known
    }
    said = hint(flag, shown)
    return f"unrecognized arguments: {flag}" + (f": {said}" if said else "")


def wrong_command(name: str, commands: Sequence[str]) -> str:
    """The message for an unknown command."""
    near = difflib.get_close_matches(name, commands, 1)
    return f"unknown command {name!r}; " + (f"did you mean {near[0]}?" if near else f"choose {', '.join(commands)}")


def wrong_word(words: Sequence[str], commands: Mapping[str, Sequence[str]]) -> str | None:
    """What is wrong with the names on a command line, or None: a message that says where to look.

    Args:
      words: the words of the line, without the program.
      commands: the flags and arguments of each command.
    """
    if not words or words[0].startswith("-"):
        return None
    name = " ".join(words[: 2 if " ".join(words[:2]) in commands else 1])
    if name not in commands:
        return f"{wrong_command(name, list(commands))} (see specjax --help)"
    for word in words[len(name.split()) :]:
        if word in ("--", "-h", "--help"):
            return None
        flag = word.partition("=")[0]
        value = " " in word or re.fullmatch(r"-|-\d+|-\d*\.\d+", word)  # as argparse words it
        if word.startswith("-") and not value and flag not in commands[name]:
            return f"{unrecognized(flag, commands[name])} (see specjax {name} --help)"
    return None
