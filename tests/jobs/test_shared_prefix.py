"""A prefix that all prompts share is prefilled once, by jobs and from Python, and the texts stay."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax import cli, models
from specjax.decode import Diffusion
from specjax.models import LlamaLM, Masked, llama_config
from specjax.serve.engine import Engine

COMMON = tuple((5 * i + 3) % 22 for i in range(40))
PROMPTS = [[*COMMON, *range(1, 1 + n)] for n in (0, 3, 20, 1, 7, 0)]


CONFIG = llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=128)


@dataclasses.dataclass(frozen=True)
class Counted(LlamaLM):
    """Counts the tokens of every pass over more than one, when it runs."""

    def __call__(self, params, block, cache, **wanted):
        if block.tokens.shape[1] > 1:
            jax.debug.callback(SEEN.append, block.tokens.size)
        return super().__call__(params, block, cache, **wanted)


SEEN: list = []


def toy(masked=None):
    lm = Counted(CONFIG)
    weights = jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(0)))
    return models.Model(lm, weights, None, (), "toy", Path(), np.dtype("float32"), masked)


def read(prompts, shared_prefix=False, **options):
    """Texts, and how many tokens went through the target in prefill."""
    SEEN.clear()
    engine = Engine(toy(), drafter="none")
    requests = [engine.request(prompt, max_new_tokens=6, **options) for prompt in prompts]
    records = list(engine.run(requests, batch_size=2, shared_prefix=shared_prefix))
    jax.effects_barrier()
    return [record.tokens for record in records], sum(map(int, SEEN))


@pytest.mark.slow
def test_the_prefix_is_prefilled_once():
    """Sampled, in two slots that are refilled: 40 shared tokens in one chunk of 48, and rests in chunks of 16 and 32."""
    options = {"temperature": 0.8, "repetition_penalty": 1.2}
    want, whole = read(PROMPTS, **options)
    got, shared = read(PROMPTS, shared_prefix=True, **options)
    assert got == want
    # one row enters at a time; an empty rest takes the least chunk
    assert whole == 5 * 48 + 64 and shared == 48 + 5 * 16 + 32


def test_what_is_too_short_is_not_shared():
    engine = Engine(toy(), drafter="none")
    ask = lambda *prompts: [engine.request(list(prompt), max_new_tokens=2) for prompt in prompts]
    assert engine.shared_prefix(ask(COMMON, COMMON[:20], [*COMMON, 1])) == COMMON[:20]
    assert engine.shared_prefix(ask(COMMON, COMMON[:15])) == ()
    assert engine.shared_prefix(ask(COMMON)) == () == engine.shared_prefix([])
    with pytest.raises(ValueError, match="does not begin with the shared prefix of 20 tokens"):
        engine.turns(ask(COMMON, [1, 2]), prefix=COMMON[:20])


@pytest.mark.parametrize("block,why", ((0, "reads a text in both directions"), (8, "prompts of autoregressive models")))
def test_diffusion_models_share_none(block, why):
    engine = Engine(toy(Masked(23, False, block)), Diffusion(unmask="threshold"))
    requests = [engine.request(prompt, max_new_tokens=8) for prompt in PROMPTS]
    with pytest.raises(ValueError, match=why):
        engine.run(requests, shared_prefix=True)


@pytest.mark.slow
def test_a_job_goes_on_with_the_prefix_of_its_whole_input(tmp_path, capsys):
    """What is left after a kill shares more than the whole: the prefix is still that of the whole."""
    models.save(tmp_path / "toy", LlamaLM(CONFIG), toy().params)
    common = [1 + i % 7 for i in range(20)]
    prompts = [[*common, 9], [*common, 3, 4], *([*common, 5, 5, 6, *[7] * i] for i in range(3))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts) + "{\n")
    output = tmp_path / "out.jsonl"

    def run(*more):
        words = [
            "--model",
            tmp_path / "toy",
            "--drafter",
            "draft:model=" + str(tmp_path / "toy"),
            "--max-new-tokens",
            8,
        ]
        words += ["--input", tmp_path / "in.jsonl", "--output", output, "--batch-size", 2, "--temperature", 1.0, *more]
        return cli.main(["generate", *map(str, words)]), capsys.readouterr().err

    status, err = run("--shared-prefix")
    whole = output.read_bytes()
    assert status == 1 and "the 5 prompts share their first 20 tokens, which are prefilled once" in err
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert run("--shared-prefix")[0] == 1 and output.read_bytes() == whole
    status, err = run()
    assert status == 2 and "decoding shared_prefix (true there, not given here)" in err
    output.unlink()
    Path(f"{output}.job.json").unlink()
    run()
    texts = lambda lines: [json.loads(line).get("tokens") for line in lines.splitlines()]
    assert texts(output.read_bytes()) == texts(whole)
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2]}\n{"prompt": [1, 3]}\n')
    output = tmp_path / "other.jsonl"
    assert "--shared-prefix does nothing here" in run("--shared-prefix")[1]
