"""Text in, text out, in one call."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from specjax.decode import Decode
from specjax.draft import Drafter
from specjax.models.text import Chat
from specjax.names import named
from specjax.search import Selection
from specjax.serve.call import Call
from specjax.serve.engine import Engine
from specjax.serve.prompts import check_there
from specjax.serve.request import Record
from specjax.serve.sampling import Sampling


@named
def generate(
    model: Any = None,
    prompts: Any = None,
    *,
    decode: str | Decode | None = None,
    drafter: str | Drafter | tuple[Drafter, Any] | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    constraint: Any = None,
    num_return_sequences: int = 1,
    select: str | Selection | None = None,
    chat: bool | Chat = False,
    logprobs: bool | Literal["prompt"] = False,
    dtype: Any = None,
    mesh: Any = None,
    batch_size: int = 8,
    progress: bool | None = None,
) -> list[Record]:
    """Completes prompts and returns a record for each, in order.

    With the default verifier, the same seed gives the same text, whatever the drafter, the batch or the mesh. Options
    that are not given come from the model's `generation_config.json`, except the temperature. The logger `specjax`
    warns about entries of that file that are not applied.

    Args:
      model: what `specjax.load` returned (it has the options of loading), a folder, a shipped name, a hub id, or None
        for the shipped target. Your own model is a `specjax.models.Model`, or a pair of an LM (`specjax.lm.BaseLM`) and
        its parameters.
      prompts: a string, token ids (a list, an array, or a tokenizer's output, without its padding), chat messages, or
        an iterable of these. A prompt may also be a dict, like a line of an input file, with `prompt` or `messages`. It
        may set `id`, `suffix` (the text after the new text; a diffusion model fills in `max_new_tokens` tokens before
        it) and its own options of `specjax.Sampling`. If the model has an encoder, it reads the prompt, which may then be
        an array `[S, F]` of features, and records hold the decoder's text.
      decode: a way to decode (`specjax.decode`) or its line: `"beam:num_beams=4"`,
        `"threshold:threshold=0.9,cache=dual"`; None: with a drafter, or by the policy of a diffusion model.
      drafter: in place of `decode`: a drafter's line such as `"eagle3:verifier=typical"`, a drafter, or it and its parameters.
      sampling: every option of a prompt (`specjax.Sampling`), or one for each prompt.
      temperature: 0 is greedy; this and the next six options take precedence over `sampling`.
      top_k: keeps the k likeliest tokens; 0 is off.
      top_p: keeps the smallest set of likeliest tokens with this mass; 1 is off.
      seed: decides the noise, together with the prompt.
      max_new_tokens: the limit of new tokens; None: 128.
      stop: one or several strings that end a text, which does not include them.
      constraint: a language that every text belongs to: `"json:FILE"`, `"json:{...}"` (a JSON Schema), `"regex:..."`,
        `"choice:a|b"`, `"grammar:FILE"` or `"nested:FILE"`; see docs/constraints.md.
      num_return_sequences: independent completions of each prompt, listed together; a search gives its best texts.
      select: selects one of these completions: a `specjax.search.Selection`, or a line such as `"majority"` or
        `"borda:power=0.7"` (see `specjax searches`); None: all.
      chat: whether a text is a user's turn in the model's chat template; or a `Chat`, for tools and other arguments.
      logprobs: whether records carry log-probabilities of their tokens; "prompt": also of their prompts' tokens, for
        which every prompt is read once more.
      dtype: the type of the parameters if the model is loaded here; see `specjax.load`.
      mesh: a mesh, or a line such as `"data=2,model=4"`.
      batch_size: rows decoded together; changes speed, never text.
      progress: whether to show a bar of records on stderr; None: for several prompts on a terminal or in a notebook.

    Raises:
      ValueError: before any work is done, with one line about the argument that cannot be used.

    >>> import specjax
    >>> record = specjax.generate(None, "Repeat the list. [ hen, dog, deer, olive, mouse, mango ]", chat=True)[0]
    >>> record.text, record.finish_reason
    (' [ hen, dog, deer, olive, mouse, mango ]', 'eos')
    """
    if prompts is None:
        check_there(model)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    options |= {"max_new_tokens": max_new_tokens, "stop": stop, "constraint": constraint}
    how = {"num_return_sequences": num_return_sequences, "select": select, "chat": chat}
    call = Call.of(prompts, sampling=sampling, options=options, **how)
    rows, keeps = min(batch_size, len(call.prompts) * num_return_sequences), call.keeps(bool(logprobs))
    engine = Engine(model, decode, drafter=drafter, dtype=dtype, mesh=mesh, logprobs=keeps, rows=rows)
    call = dataclasses.replace(call, logprobs=bool(logprobs))
    return call.records(engine, batch_size=batch_size, prompt_logprobs=logprobs == "prompt", progress=progress)
