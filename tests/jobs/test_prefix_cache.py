"""What was read of prompts serves later ones that begin equally: the texts and the drafts stay, whatever the cache holds."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save
from support.hybrids import MIXERS

import specjax
from specjax import cli, models
from specjax import decoder as decoding
from specjax.decode import Diffusion, Speculate
from specjax.draft import Eagle, ModelDrafter
from specjax.expand import Chain
from specjax.models import LlamaLM, Masked, llama_config
from specjax.models.ropes import RopeConfig
from specjax.serve import prefix_cache, prefix_file
from specjax.serve.disaggregated import DisaggregatedEngine
from specjax.serve.engine import Engine
from specjax.serve.prefix_cache import PrefixCache, Tree, keys_of_blocks

CONFIG = llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=128)
GROUPS = [[(5 * i + 3 * i * i + 7 * group) % 22 for i in range(40)] for group in range(2)]
PROMPTS = [[*GROUPS[i % 2][: 40 - 3 * (i // 4)], *(1 + n % 22 for n in range(4 * i))] for i in range(7)]
LARGE = 2_000_000
BLOCK = 16
SEEN: list = []


@dataclasses.dataclass(frozen=True)
class Counted(LlamaLM):
    """Counts the tokens of every pass over more than one, when it runs."""

    def __call__(self, params, block, cache, **wanted):
        if block.tokens.shape[1] > 1:
            jax.debug.callback(SEEN.append, block.tokens.size)
        return super().__call__(params, block, cache, **wanted)


def toy(lm=None, masked=None):
    lm = lm or Counted(CONFIG)
    weights = jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(0)))
    return models.Model(lm, weights, None, (), "toy", Path(), np.dtype("float32"), masked)


def drafter_of(name, model):
    """A drafter with a cache of its own; a line as it is."""
    if name == "draft":
        lm = LlamaLM(CONFIG)
        return ModelDrafter(lm, Chain(length=3)), lm.init(jax.random.key(0))
    if name == "eagle1":
        head = Eagle().bind(model.lm)
        return head, head.init_params(jax.random.key(1), model.params)
    return name


def written(engine, temperatures=(0.0, 1.0), prompts=PROMPTS):
    """Tokens of every prompt, greedy and sampled, and how many drafts each step took."""
    made = [engine.request(p, max_new_tokens=6, temperature=t, seed=2) for t in temperatures for p in prompts]
    return [(record.tokens, record.accepted) for record in engine.run(made, batch_size=3)]


def same(name, model, **options):
    """A large cache, the same again when it is full, and one where blocks make room for others, against none."""
    want = written(Engine(model, drafter=drafter_of(name, model), **options))
    cache = PrefixCache(LARGE, BLOCK)
    engine = Engine(model, drafter=drafter_of(name, model), prefix_cache=cache, **options)
    assert written(engine) == want
    assert cache.hits == 12 and cache.requests == 14 and cache.evicted == 0
    assert engine.timing.prompt_tokens == 2 * sum(len(p) - 1 for p in PROMPTS)
    blocks, known = len(cache), engine.timing.known_tokens
    assert written(engine) == want and len(cache) == blocks and cache.hits == 26
    need = LARGE // len(cache.pool[0])
    small = PrefixCache(6 * need, BLOCK)
    engine = Engine(model, drafter=drafter_of(name, model), prefix_cache=small, **options)
    assert written(engine) == want
    assert len(small) == 5 < blocks and small.evicted and 0 < engine.timing.known_tokens < known
    return cache


def test_the_longest_beginning_is_found_and_the_oldest_leaf_goes():
    tree = Tree(4)
    put = lambda *keys: [tree.add(path, key) for i, key in enumerate(keys) for path in [tree.path(keys[:i])]]
    one, two = put(b"1", b"2")
    assert tree.path([b"1", b"2", b"3"]) == [one, two] and tree.path([b"2"]) == []
    (other,) = put(b"x")
    assert len(tree) == 3 and not tree.evicted
    tree.path([b"1"])  # used after its own continuation, which is the oldest now
    (three,) = [tree.add([other], b"y")]
    assert tree.path([b"1", b"2"]) == [one] and three.place == two.place and tree.evicted == 1
    assert tree.add(tree.path([b"x", b"y"]), b"z") is not None and tree.path([b"1"]) == []
    full = tree.path([b"x", b"y", b"z"])
    assert len(full) == 3 and tree.add(full, b"w") is None and tree.path([b"x", b"y", b"z"]) == full


def test_a_block_is_known_with_the_token_after_it():
    first, second = keys_of_blocks([1, 2, 3, 4, 5], 2)
    assert keys_of_blocks([1, 2, 3], 2) == [first] and keys_of_blocks([1, 2, 9], 2) != [first]
    assert keys_of_blocks([1, 2], 2) == [] and keys_of_blocks([7, 7, 3, 4, 5], 2)[1] == second


@pytest.mark.slow
def test_known_tokens_are_not_read_again_and_nothing_is_compiled_again():
    """The first prompt is read in two blocks and a rest; of one that goes on after a block, only what follows is read."""
    SEEN.clear()
    cache = PrefixCache(LARGE, BLOCK)
    engine = Engine(toy(), drafter="none", prefix_cache=cache)
    read = []

    def run(*prompts):
        SEEN.clear()
        found = [one[0] for one in written(engine, (0.5,), prompts)]
        jax.effects_barrier()
        read.append(sum(map(int, SEEN)))
        return found

    first = run(GROUPS[0])
    programs = ("read_block", "read_rest", "known_row", "empty_pool")
    sizes = lambda: [getattr(prefix_cache, n)._cache_size() for n in programs] + [decoding.insert_program._cache_size()]
    compiled = sizes()
    assert run(GROUPS[0]) == first
    run([*GROUPS[0][:20], 5, 6])
    run([*GROUPS[1], *GROUPS[0], 1, 2, 3])
    assert read == [3 * BLOCK, BLOCK, BLOCK, 6 * BLOCK] and sizes() == compiled
    assert engine.timing.known == "48 of 181 prompt tokens known"
    assert len(cache) == 2 + 0 + 5 and "7 blocks, 2 of 4 prompts" in repr(cache)
    engine.update(jax.tree.map(lambda x: x + 0, engine.model.params))
    assert run(GROUPS[0]) == first and read[-1] == 3 * BLOCK and len(cache) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft", "eagle1", "token_recycling"])
def test_texts_and_drafts_stay(name):
    same(name, toy(LlamaLM(CONFIG)))


@pytest.mark.slow
def test_states_and_windows_are_kept_as_a_whole(monkeypatch):
    """A running state and a ring, at the end of every block."""
    monkeypatch.setattr(sys.modules[specjax.Speculative.__module__], "PREFILL_WIDTHS", (BLOCK,))
    first = CONFIG.layers[0]
    windowed = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, window=8))
    state = dataclasses.replace(first, mixer=MIXERS["gated_delta"])
    lm = LlamaLM(dataclasses.replace(CONFIG, layers=(first, windowed, state)))
    cache = same("none", toy(lm))
    assert {0, 1} == set(next(iter(cache._layouts.values()))[0].slots)


@pytest.mark.slow
def test_a_search_begins_with_known_blocks():
    model = toy(LlamaLM(CONFIG))
    found = []
    for options in ({}, {"prefix_cache": PrefixCache(LARGE, BLOCK)}):
        engine = Engine(model, "beam:num_beams=2", **options)
        found.append([written(engine, (0.0,)) for _ in range(2)])
    assert found[0] == found[1] and engine.prefix_cache.hits == 12


@pytest.mark.slow
def test_a_mesh_writes_the_same_texts():
    model = toy(LlamaLM(CONFIG))
    engine = Engine(model, drafter="none", prefix_cache=PrefixCache(LARGE, BLOCK), mesh="data=4,model=2")
    found = written(engine, (0.0,))
    assert engine.prefix_cache.hits == 5
    assert found == written(Engine(model, drafter="none"), (0.0,))


@pytest.mark.slow
def test_a_job_with_any_size_writes_the_same_bytes(tmp_path, capsys):
    models.save(tmp_path / "toy", LlamaLM(dataclasses.replace(CONFIG, max_position_embeddings=512)), toy().params)
    head = [[1 + (i * i + group) % 7 for i in range(150)] for group in range(2)]
    prompts = [[*head[i % 2], *range(1, 3 + i)] for i in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    output = tmp_path / "out.jsonl"

    def run(*more):
        words = ["--model", tmp_path / "toy", "--drafter", "none", "--max-new-tokens", 5, "--temperature", 1.0]
        words += ["--input", tmp_path / "in.jsonl", "--output", output, "--batch-size", 2, *more]
        return cli.main(["generate", *map(str, words)]), capsys.readouterr().err

    status, err = run("--prefix-cache", "1MB")
    known = 4 * 128
    assert status == 0 and f"{known} of {sum(map(len, prompts)) - 6} prompt tokens known" in err
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    kept = ("--prefix-cache-file", tmp_path / "prefixes")
    assert run("--prefix-cache", "2MiB", *kept)[0] == 0 and output.read_bytes() == whole
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    status, err = run("--prefix-cache", "1MB", *kept)
    assert status == 0 and output.read_bytes() == whole and "384 of" in err
    status, err = run()
    assert status == 2 and "decoding prefix_cache (true there, not given here)" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft", "eagle1"])
def test_a_file_gives_a_later_engine_what_was_read(name, tmp_path):
    """Everything, or as much as a smaller cache has room for; a path of blocks is whole."""
    model, file = toy(LlamaLM(CONFIG)), tmp_path / "prefixes"
    made = lambda size: Engine(model, drafter=drafter_of(name, model), prefix_cache=PrefixCache(size, BLOCK))
    first, second = made(LARGE), made(LARGE)
    want = written(first)
    prefix_file.save(first, file)
    assert prefix_file.load(second, file) == len(first.prefix_cache) == len(second.prefix_cache) > 4
    assert second.prefix_cache.requests == 0 and written(second) == want
    assert second.prefix_cache.hits == 14 and not second.prefix_cache.evicted
    again = tmp_path / "again"
    prefix_file.save(second, again)
    assert prefix_file.load(first, again) == len(second.prefix_cache) and written(first) == want
    room = 5 * (LARGE // len(first.prefix_cache.pool[0]))
    small = made(room)
    assert prefix_file.load(small, file) == 4 and len(small.prefix_cache) == 4
    assert written(small) == want and small.timing.known_tokens


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_two_readings_agree_up_to_rounding(dtype):
    one, other = (np.random.default_rng(seed).normal(size=(3, 500)) for seed in (0, 1))
    cast = lambda x: np.asarray(jnp.asarray(x, jnp.float32).astype(dtype))
    eps = float(jnp.finfo(dtype).eps)
    assert prefix_file._agree(cast(one), cast(one * (1 + eps)))
    assert not prefix_file._agree(cast(one), cast(other)) and not prefix_file._agree(cast(one), cast(2 * one))
    assert not prefix_file._agree(cast(one), np.full_like(cast(one), np.nan))


@pytest.mark.slow
def test_a_file_of_something_else_is_refused(tmp_path):
    model, file = toy(LlamaLM(CONFIG)), tmp_path / "prefixes"
    engine = Engine(model, drafter="none", prefix_cache=PrefixCache(LARGE, BLOCK))
    prefix_file.save(engine, file)
    assert not file.exists()  # nothing was read
    written(engine)
    prefix_file.save(engine, file)
    changed = dataclasses.replace(model, params=jax.tree.map(lambda x: 1.01 * x, model.params))
    first = CONFIG.layers[0]
    mixer = dataclasses.replace(first.mixer, rope=RopeConfig(theta=50.0))
    scaled = dataclasses.replace(CONFIG, layers=(dataclasses.replace(first, mixer=mixer),))
    scaled = dataclasses.replace(model, lm=LlamaLM(scaled))
    for other, drafter, block, why in (
        (changed, "none", BLOCK, "of another model, drafter or device"),
        (scaled, "none", BLOCK, "of another model, drafter or device"),
        (model, "draft", BLOCK, "of another model, drafter or device"),
        (model, "none", 32, "has blocks of 16 tokens, and this prefix cache has blocks of 32"),
    ):
        own = Engine(other, drafter=drafter_of(drafter, other), prefix_cache=PrefixCache(LARGE, block))
        with pytest.raises(ValueError, match=why):
            prefix_file.load(own, file)
        assert len(own.prefix_cache) == 0
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match="cannot read a prefix cache from"):
        prefix_file.load(engine, file)
    (tmp_path / "other").write_bytes(save({"x": np.zeros(1)}))
    with pytest.raises(ValueError, match="is no prefix cache: name another file"):
        prefix_file.load(engine, tmp_path / "other")
    with pytest.raises(ValueError, match="this engine has no prefix cache"):
        prefix_file.load(Engine(model, drafter="none"), file)


def test_wrong_sizes_and_engines_are_said_in_one_line(capsys):
    for size, block, why in (
        ("lots", 128, "prefix_cache 'lots' is not a size"),
        (0, 128, "a size above 0, got 0"),
        (LARGE, 48, "blocks of 16, 32, 64, 128 tokens, not of 48"),
    ):
        with pytest.raises(ValueError, match=why):
            PrefixCache(size, block)
    model = toy()
    with pytest.raises(ValueError, match="holds no block of 16 tokens of this model: give at least 0.1MB"):
        Engine(model, drafter="none", prefix_cache=PrefixCache(1000, BLOCK))
    cache = PrefixCache(LARGE, BLOCK)
    engine = Engine(model, drafter="none", prefix_cache=cache)
    assert Engine(model, drafter="none", prefix_cache=cache).prefix_cache is cache
    with pytest.raises(ValueError, match="belongs to an engine with other parameters"):
        Engine(toy(), drafter="none", prefix_cache=cache)
    requests = [engine.request(prompt, max_new_tokens=2) for prompt in PROMPTS]
    with pytest.raises(ValueError, match="give it or a shared prefix, not both"):
        engine.run(requests, shared_prefix=True)
    with pytest.raises(ValueError, match="give it or a shared prefix, not both"):
        list(engine.turns(requests[::2], prefix=GROUPS[0][:20]))
    with pytest.raises(ValueError, match="diffusion model without a prefix cache"):
        Engine(toy(masked=Masked(23, False, 0)), Diffusion(unmask="threshold"), prefix_cache=LARGE)
    with pytest.raises(ValueError, match="a cache that forgets folds older blocks by all of a prompt"):
        Engine(model, Speculate("none", cache="ems"), prefix_cache=LARGE)
    with pytest.raises(ValueError, match="AStar reads every prompt by itself: leave the prefix cache out"):
        Engine(model, "astar", prefix_cache=LARGE)
    with pytest.raises(ValueError, match="leave prefix_cache out"):
        DisaggregatedEngine(model, mesh="model=1", prefill_mesh="model=1", prefix_cache=LARGE)
    assert cli.main(["generate", "--prefix-cache", "lots", "a"]) == 2
    assert "--prefix-cache 'lots' is not a size" in capsys.readouterr().err
    for words, why in (
        ((), "for a prefix cache: give its size too"),
        (
            ("--prefix-cache", "1MB", "--ray", "auto", "--input", __file__, "--output", "out.jsonl"),
            "for a job of one process",
        ),
        (("--prefix-cache", "1MB", "--drafter", "draft", "--learn", "x"), "leave --prefix-cache-file or --learn out"),
        (
            ("--prefix-cache", "1MB", "--output", "no-folder.jsonl", "--input", __file__),
            "must not be the --output file",
        ),
        (("--prefix-cache", "1MB"), "there is no such folder"),
    ):
        file = "no-folder.jsonl" if "--output" in words else "no/folder/prefixes"
        assert cli.main(["generate", "--prefix-cache-file", file, *words, *([] if "--input" in words else ["a"])]) == 2
        assert why in capsys.readouterr().err
    assert cli.main(["generate", "--prefix-cache", "1MB", "--shared-prefix", "a"]) == 2
    assert "give it or a shared prefix, not both" in capsys.readouterr().err
