"""The stdlib corpus, and the pieces of the pretraining recipe that other figures rest on."""

import ast
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.bench import stdlib

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def test_training_and_heldout_files_are_apart_and_are_code():
    train, heldout = stdlib.training_files(), stdlib.heldout_files()
    assert not set(train) & set(heldout)
    assert len(heldout) >= 20 and len(train) > 300
    relative = [path.relative_to(stdlib.root()).parts for path in train + heldout]
    skipped = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    assert not any(skipped & set(parts) for parts in relative)


def test_heldout_files_are_a_twentieth_of_the_bytes():
    train = sum(path.stat().st_size for path in stdlib.training_files())
    heldout = sum(path.stat().st_size for path in stdlib.heldout_files())
    assert 0.03 < heldout / (train + heldout) < 0.07


def test_prompts_are_openings_of_heldout_functions():
    prompts = stdlib.heldout_functions(20)
    assert prompts == stdlib.heldout_functions(20)
    assert len(set(prompts)) == 20
    sources = [stdlib.read(path) for path in stdlib.heldout_files()]
    for prompt in prompts:
        assert 200 <= len(prompt) <= 500
        assert prompt == prompt.rstrip("\n")
        text = prompt.split("\n", 1)[1] if prompt.startswith("class ") else prompt
        holders = [i for i, source in enumerate(sources) if text + "\n" in source]
        assert holders, prompt
        assert "def " in text
    longest = max(prompt.count("\n") for prompt in prompts)
    assert longest < 40


def test_prompts_spread_over_the_files():
    sources = [stdlib.read(path) for path in stdlib.heldout_files()]
    body = [p.split("\n", 1)[1] if p.startswith("class ") else p for p in stdlib.heldout_functions(20)]
    used = {next(i for i, source in enumerate(sources) if text in source) for text in body}
    assert len(used) >= 15


def test_more_prompts_than_there_are():
    prompts = stdlib.heldout_functions(100_000)
    assert 100 < len(prompts) < 100_000
    assert len(set(prompts)) == len(prompts)
    with pytest.raises(ValueError, match="at least one"):
        stdlib.heldout_functions(0)


def test_methods_come_with_their_class():
    source = (
        "class A:\n    def f(self, x):\n"
        + '        """'
        + "word " * 40
        + '"""\n'
        + "        a = 1\n        b = 2\n        c = 3\n"
    )
    ast.parse(source)
    (prompt,) = stdlib._prompts(source)
    assert prompt.startswith("class A:\n    def f(self, x):") and prompt.endswith("a = 1")


def test_tokenizer_round_trips_and_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from experiments.pretrain import corpus

    texts = [stdlib.read(path) for path in stdlib.heldout_files()[:3]]
    corpus.save_tokenizer(corpus.train_tokenizer(texts, 400), tmp_path, 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 400
    for text in [*texts, "x = 'é' # ☃ \t \r\n\n    y  =  .1 ,  2\n", " , . 's n't"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "def f():"}, {"role": "assistant", "content": "    pass"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "def f():\n    pass\n"


def test_batches_resume_where_they_stopped():
    from experiments.pretrain import corpus

    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 50, size) for size in (37, 90, 11, 64)]
    make = lambda start: corpus.batches(documents, eos=0, length=8, rows=3, seed=5, start=start)
    whole = make(0)
    first = [next(whole) for _ in range(20)]
    assert all(batch.shape == (3, 9) for batch in first)
    later = make(13)
    for expected in first[13:]:
        np.testing.assert_array_equal(next(later), expected)


def test_evaluation_counts_every_token_once():
    from experiments.pretrain import corpus

    documents = [np.arange(1, n + 1) for n in (3, 8, 9, 30)]
    windows, counted = corpus.evaluation_windows(documents, eos=0, length=8)
    seen = sorted(windows[:, 1:][counted].tolist())
    assert seen == sorted(np.concatenate(documents).tolist())


@pytest.mark.parametrize("scale", [0.3, 200.0])  # the second saturates the softmax
def test_training_attention_is_the_librarys(scale):
    from experiments.pretrain import attention
    from specjax.kernels.tree_attention import tree_attention

    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 7, 4, 8))
    k, v = (jax.random.normal(key, (2, 7, 2, 8)) for key in keys[1:])

    def total(function, q, k, v):
        out = function(q, k, v, None, None, jnp.zeros(2, jnp.int32), scale=scale, causal=True)
        return jnp.sum(jnp.sin(out)), out

    results = [
        jax.value_and_grad(total, argnums=(1, 2, 3), has_aux=True)(f, q, k, v)
        for f in (tree_attention, functools.partial(attention.dense_attention, causal=True))
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, scale))
