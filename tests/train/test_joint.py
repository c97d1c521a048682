"""Joint training of a head and its target: its loss against PEFT's model, what it writes, and what it refuses."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import small_training as tiny
from support.objectives import DRAWN, FIXED, packed
from support.passes import logits

import specjax
from specjax import cli, models
from specjax.draft import Medusa
from specjax.draft.medusa.objective import TrainMedusa
from specjax.expand import Chain
from specjax.models import adapter_writing
from specjax.models.loading import naming_of
from specjax.models.masked import Masked
from specjax.objectives.base import Batch
from specjax.objectives.joint import Joint
from specjax.objectives.losses import CrossEntropy
from specjax.sharding import make_mesh
from specjax.train.loop import Settings, TrainState, gradients, update
from specjax.train.options import TrainOptions
from specjax.train.trainable import trainable

TEXT = {"divergence": CrossEntropy("text"), "decay": 0.8}


def drawn(params, seed=0, share=0.1):
    """The same parameters with noise, so that nothing in them is 0."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [np.asarray(x + share * rng.normal(size=x.shape), np.float32) for x in leaves]
    return jax.tree.unflatten(tree, noisy)


def test_nothing_is_learned_where_nothing_is_asked():
    """The target is as it was, and the heads have no weight: the loss is 0, and so is its gradient."""
    medusa = TrainMedusa(Medusa(Chain(2), heads=2).bind(tiny.DRAFT))
    objective = Joint(medusa, rank=2, weight=0.0, teacher="self")
    params = objective.init(jax.random.key(0), tiny.draft_params())
    again = objective.adapted(tiny.draft_params(), params["adapter"])
    jax.tree.map(np.testing.assert_array_equal, again, tiny.draft_params())

    @jax.jit
    def both(params):
        loss = lambda params: objective.loss(params, tiny.draft_params(), packed(), jax.random.key(1))[0]
        return jax.value_and_grad(loss)(params)

    loss, grads = both(params)
    assert abs(float(loss)) < 1e-6 and all(float(jnp.abs(x).max()) < 1e-6 for x in jax.tree.leaves(grads))
    loss, grads = both(drawn(params))
    assert float(loss) > 1e-4 and float(jnp.abs(grads["adapter"]["head"]["a"]).max()) > 1e-4


def test_settings():
    assert Joint.presets["paper"]["weight"] == pytest.approx(0.2 * 0.8)  # of the first head
    assert Joint.presets["self"]["weight"] == pytest.approx(0.01 * 0.8)
    for wrong, said in (
        ({"rank": 0}, "rank must be above 0"),
        ({"weight": -1.0}, "weight must not be negative"),
        ({"teacher": "base"}, "teacher must be text or self, got 'base'"),
        ({"schedule": "linear"}, "schedule must be constant or sine"),
    ):
        with pytest.raises(ValueError, match=f"joint: {said}"):
            Joint(None, **wrong)
    batch = dataclasses.replace(packed(), done=jnp.full((2,), 1 / 3))
    sine = Joint(None, schedule="sine")
    assert float(sine._share(batch)) == pytest.approx(0.5) and sine._share(packed()) == 1.0


def refused(line, target, **options):
    options = TrainOptions(drafter=line, output="", **options)
    with pytest.raises(ValueError) as error:
        trainable()["joint"].make(target, options, lambda: None)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refusals():
    target = tiny.model(tiny.TARGET, tiny.target_params())
    packed_target = dataclasses.replace(target, weights="int8")
    diffusion = dataclasses.replace(target, masked=Masked(31, False))
    assert "--features is not for joint, which changes the target" in refused("joint", target, features="folder")
    assert "joint trains tiny's own weights, and they are int8: leave out --weights" in refused("joint", packed_target)
    assert "specjax convert --adapter" in refused("joint", target, adapter=("folder",))
    assert "tiny is a diffusion model" in refused("joint", diffusion)
    assert "'lm' is none; choose " in refused("joint:head=lm", target)
    assert "has no field 'ranks'" in refused("joint:ranks=3", target)
    assert "heads must be at least 1" in refused("joint:head=(medusa:heads=0)", target)
    assert "presets paper, self, not 'small'" in refused("joint:preset=small", target)


def test_the_line():
    target = dataclasses.replace(tiny.model(tiny.TARGET, tiny.target_params()), path=None)
    options = TrainOptions(drafter="joint:preset=paper,rank=3,head=(medusa:heads=2,decay=0.5)", output="")
    task = trainable()["joint"].make(target, options, lambda: None)
    assert task.objective.head.drafter.heads == 2 and task.objective.head.decay == 0.5
    assert (task.objective.rank, task.objective.weight, task.objective.rates) == (3, 0.16, {"head": 4.0})
    assert task.params["adapter"]["layers"][1]["mlp"]["down"]["a"].shape == (3, 48)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "kangaroo", "ppd"])
def test_a_head_teaches_the_target_through_its_features(name):
    """Each of another kind. The target's own loss has no gradient at its start."""
    objective = Joint((FIXED | DRAWN)[name], rank=2, teacher="self")
    params = objective.init(jax.random.key(0), tiny.target_params())

    @jax.jit
    def grads(params):
        loss = lambda params: objective.loss(params, tiny.target_params(), packed(), jax.random.key(1))[0]
        return jax.grad(loss)(params)

    found = grads(params)["adapter"]["layers"][0]
    assert min(float(jnp.abs(found[part][own]["b"]).max()) for part, own in (("attention", "v"), ("mlp", "up"))) > 1e-5


@pytest.mark.slow
def test_the_head_learns_faster_by_its_rate():
    """The first update of Adam is the learning rate, whatever the gradient; B moves, and A does not until B has."""
    objective = dataclasses.replace(FIXED["joint"], rate=3.0)
    params = objective.init(jax.random.key(0), tiny.target_params())
    settings = Settings(steps=10, learning_rate=1e-3)
    state = TrainState.begun(settings, jax.tree.map(jnp.copy, params))
    after = update(objective, settings, state, tiny.target_params(), packed())[0].params
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), after, params)
    rate = moved["adapter"]["layers"][0]["attention"]["q"]["b"]
    assert rate == pytest.approx(float(settings.schedule(0)), rel=1e-3)
    assert moved["head"]["heads"][0]["kernel"] == pytest.approx(3 * rate, rel=1e-3)


@pytest.mark.slow
@pytest.mark.covers("placement")
def test_on_a_mesh_with_copies_of_kv_heads():
    """Changes are of the heads that there are, and every copy of a head has its change."""
    mesh = make_mesh("data=2,model=4")
    lm, target = models.spread(tiny.TARGET, tiny.target_params(), mesh)
    assert lm.kv_copies == 2
    one = FIXED["joint"]
    wide = dataclasses.replace(one, head=dataclasses.replace(one.head, drafter=one.head.drafter.bind(lm)))
    params = drawn(one.init(jax.random.key(0), tiny.target_params()))
    fresh = jax.eval_shape(wide.fresh, jax.random.key(0), target)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params["adapter"])
    run = jax.jit(gradients, static_argnums=(0, 5, 6))
    grads, metrics, _ = run(wide, params, target, packed(), jax.random.key(1), 1, mesh)
    expected, others, _ = run(one, params, tiny.target_params(), packed(), jax.random.key(1), 1, None)
    assert float(metrics["loss"]) == pytest.approx(float(others["loss"]), rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), grads, expected)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A tiny Llama of transformers, and the same one loaded here."""
    pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.2, tie_word_embeddings=False)
    theirs = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("joint") / "target"
    theirs.save_pretrained(folder)
    return theirs, models.load(folder, dtype="float32")


def rows():
    """Right-padded rows that begin with prompts."""
    rng = np.random.default_rng(1)
    tokens, slots = rng.integers(1, 32, (3, 12)).astype(np.int32), np.arange(12)[None]
    begin, end = np.asarray([[2], [0], [4]]), np.asarray([[12], [9], [11]])
    return Batch(jnp.asarray(np.where(slots < end, tokens, 0)), jnp.asarray((slots >= begin) & (slots < end)))


def written(objective, changes, target, folder):
    stored = adapter_writing.stored_changes(changes, target.params, *naming_of(target))
    numpy = jax.tree.map(np.asarray, changes)
    adapter_writing.write(folder, numpy, stored, objective.rank, objective.alpha, target.name, np.float32)
    return folder


def original(model, heads, batch, teacher, weight, share):
    """The authors' loss: token t + 1 + i for head i, weighted 0.8^i; with `self`, by the mean over answer tokens."""
    import torch
    from torch.nn.functional import cross_entropy, kl_div, log_softmax, silu, softmax

    ids = torch.as_tensor(np.array(batch.tokens, np.int64))
    labels = torch.where(torch.as_tensor(np.array(batch.mask)), ids, -100)
    causal = model.get_base_model()
    hidden = causal.model(ids)[0]
    loss = 0.0
    for i in range(1 + len(heads)):
        if i:
            (kernel, bias), last = heads[i - 1]
            scores = (hidden + silu(hidden @ kernel + bias)) @ last
        else:
            scores = causal.lm_head(hidden)
        given, wanted = scores[:, : -(1 + i)].flatten(0, 1), labels[:, 1 + i :].flatten()
        if i == 0 and teacher == "self":
            with torch.no_grad(), model.disable_adapter():
                before = causal(ids).logits[:, :-1].flatten(0, 1)
            due = wanted != -100
            own = kl_div(log_softmax(given[due], -1), softmax(before[due], -1), reduction="sum") / due.sum()
        else:
            own = cross_entropy(given, wanted)
        loss = loss + own * (0.8**i * weight * share if i else 1.0)
    return loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("teacher", "schedule"), [("text", "constant"), ("self", "sine")])
def test_the_loss_is_the_authors(reference, tmp_path, teacher, schedule):
    """And so are its gradients, in the heads and in the matrices that PEFT reads from the written folder."""
    import peft
    import torch

    theirs, target = reference
    medusa = TrainMedusa(Medusa(Chain(2), heads=2).bind(target.lm), **TEXT)
    objective = Joint(medusa, 3, 5.0, 0.3 * 0.8, teacher, schedule)
    params = drawn(objective.init(jax.random.key(0), target.params), share=0.3)
    batch = dataclasses.replace(rows(), done=jnp.full((3,), 0.25))
    run = jax.jit(jax.value_and_grad(lambda p: objective.loss(p, target.params, batch, jax.random.key(1))[0]))
    loss, grads = run(params)

    folder = written(objective, params["adapter"], target, tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(theirs, folder, is_trainable=True).eval()
    tensor = lambda x: torch.tensor(np.asarray(x), requires_grad=True)
    heads = [
        ([tensor(own["blocks"][0][name]) for name in ("kernel", "bias")], tensor(own["kernel"]))
        for own in params["head"]["heads"]
    ]
    share = np.sin(np.pi / 8) if schedule == "sine" else 1.0
    want = original(model, heads, batch, teacher, 0.3, share)
    want.backward()
    assert float(loss) == pytest.approx(float(want.detach()), rel=1e-5)
    for own, ((kernel, bias), last) in zip(grads["head"]["heads"], heads, strict=True):
        for ours, its in (
            (own["blocks"][0]["kernel"], kernel),
            (own["blocks"][0]["bias"], bias),
            (own["kernel"], last),
        ):
            np.testing.assert_allclose(ours, its.grad.numpy(), atol=1e-5)
    found = load_file(written(objective, grads["adapter"], target, tmp_path / "grads") / "adapter_model.safetensors")
    named = {name.replace(".default", ""): x for name, x in model.named_parameters() if x.requires_grad}
    assert found.keys() == named.keys() and len(found) == 2 * (2 * 7 + 1)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, named[name].grad.numpy(), atol=1e-5, err_msg=name)
    model.unload()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peft_and_specjax_read_the_adapter(reference, tmp_path):
    import peft
    import torch

    theirs, target = reference
    objective = Joint(TrainMedusa(Medusa(Chain(2), heads=2).bind(target.lm)), 3, 5.0)
    changes = drawn(objective.fresh(jax.random.key(0), target.params), share=0.2)
    folder = written(objective, changes, target, tmp_path / "adapter")
    ids = np.asarray(rows().tokens)
    ours = logits(target.lm, objective.adapted(target.params, changes), ids)
    assert np.abs(ours - logits(target.lm, target.params, ids)).max() > 0.1
    read = models.load(target.path, dtype="float32", adapter=folder)
    np.testing.assert_allclose(logits(read.lm, read.params, ids), ours, atol=1e-5)
    model = peft.PeftModel.from_pretrained(theirs, folder).eval()
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.as_tensor(ids)).logits.numpy(), ours, atol=1e-5)
    model.unload()


@pytest.fixture
def train(tmp_path, capsys):
    """`specjax train` on a tiny target and texts, for the folder `out`."""
    models.save(tmp_path / "target", tiny.TARGET, tiny.target_params())
    lines = [{"tokens": row.tolist()} for row in np.random.default_rng(0).integers(1, 32, (16, 12))]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--target", tmp_path / "target", "--data", tmp_path / "data.jsonl", "--steps", 6, "--batch-size", 4]
    words += ["--length", 12, "--checkpoint-every", 2]

    def go(line, out, *more):
        status = cli.main([str(word) for word in ("train", line, *words, "--output", tmp_path / out, *more)])
        return status, capsys.readouterr().err

    return go


@pytest.mark.slow
def test_from_warm_heads_to_a_text(train, tmp_path, monkeypatch):
    """Both stages, a run that is stopped and goes on, and drafts that do not change the adapted target's text."""
    status, err = train("medusa:heads=2", "first", "--learning-rate", 0.01)
    assert status == 0, err
    joint = functools.partial(train, "joint:head=(medusa:heads=2),rank=2,teacher=self,schedule=sine")
    more = ("--start", tmp_path / "first", "--learning-rate", 0.02)
    assert joint("out", *more)[0] == 0
    read = lambda out: [
        json.loads(line) for line in (tmp_path / out / "training/metrics.jsonl").read_text().splitlines()
    ]
    assert abs(read("out")[0]["target_loss"]) < 1e-6 < read("out")[-1]["target_loss"]

    save, saved = specjax.train.loop.Run.save, []

    def stopped(run, state, position):
        save(run, state, position)
        saved.append(int(state.step))
        if saved == [2, 4]:
            raise KeyboardInterrupt

    monkeypatch.setattr(specjax.train.loop.Run, "save", stopped)
    assert joint("again", *more)[0] == 130
    assert joint("again", *more, "--resume")[0] == 0
    assert [line["loss"] for line in read("again")] == [line["loss"] for line in read("out")]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()

    target = models.load(tmp_path / "target", adapter=tmp_path / "out" / "adapter")
    plain = models.load(tmp_path / "target")
    prompts = [[3, 7, 9], [20, 1, 4, 4]]
    texts = lambda model, drafter: [
        found.tokens for found in specjax.generate(model, prompts, drafter=drafter, max_new_tokens=24, temperature=0)
    ]
    drafted = texts(target, f"medusa:model={tmp_path / 'out'}")
    assert drafted == texts(target, "none") != texts(plain, "none")
