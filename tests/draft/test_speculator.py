"""The MLP and the LSTM speculator against the classes of their authors, and their published files.

The figures of `ORACLE` come from `MLPSpeculator` of foundation-model-stack/fms-extras and `ArcticLSTMSpeculator` of
snowflakedb/ArcticTraining, run in float64 with the weights, features and tokens that `tensors`, `FEATURES` and `TOKENS` make.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.published import toy, write
from support.random_weights import whole_numbers

from specjax.assembly.registry import build_drafter
from specjax.draft import LSTMSpeculator, MLPSpeculator, View
from specjax.draft.feature import FeatureDraft
from specjax.draft.heads.folder import load_head
from specjax.draft.heads.published import drafter_of
from specjax.draft.speculator.network import lstm_state, mlp_state, scaled, token_weight
from specjax.draft.speculator.objective import TrainLSTMSpeculator, TrainMLPSpeculator
from specjax.expand import Chain, Static
from specjax.lm import Output
from specjax.models import LlamaLM, ModelError, llama_config
from specjax.objectives.base import Batch
from specjax.objectives.losses import CrossEntropy
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling.sampler import Sampler

V, E, D, HEADS, LENGTH = 5, 6, 4, 3, 9
TARGET = LlamaLM(llama_config(V, E, 8, 1, 1, 1, 4, max_position_embeddings=32))
FEATURES = whole_numbers((2, LENGTH, E), 1)
TOKENS = np.random.default_rng(2).integers(0, V, (2, LENGTH)).astype(np.int32)
GATES = ("forget", "input", "output", "cell")
IBM = {
    "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": E, "inner_dim": D,
    "n_predict": HEADS, "n_candidates": 5, "top_k_tokens_per_head": [5, 4, 3], "vocab_size": V, "torch_dtype": "float32",
}  # fmt: skip
ARCTIC = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "input_hidden_dim": E,
    "inner_dim": str(D), "proj_dim": str(D), "emb_dim": str(D), "vocab_size": V, "n_predict": HEADS, "n_candidates": HEADS,
    "top_k_tokens_per_head": [1, 1, 1], "scale_input": True, "tie_weights": True, "base_model_name_or_path": "lab/target",
}  # fmt: skip
CONFIGS = {
    "ibm": IBM | {"tie_weights": False, "scale_input": False},
    "ibm, tied": IBM | {"tie_weights": True, "scale_input": True},
    "arctic, sum_rnn": ARCTIC | {"method": "sum_rnn", "tie_lstm_embs": False},
    "arctic, sum_lstm": ARCTIC | {"method": "sum_lstm", "tie_lstm_embs": True},
    "arctic, four tables": ARCTIC | {"method": "sum_lstm", "tie_lstm_embs": False},
}
KINDS = {"mlp_speculator": MLPSpeculator, "lstm_speculator": LSTMSpeculator}


def shapes(case):
    """The parameters of the authors' module, where shared ones have the first of their names."""
    config = CONFIGS[case]
    steps = 1 if config["tie_weights"] else HEADS
    found = {f"head.{i}.weight": (V, D) for i in range(steps)}
    if config.get("method") == "sum_lstm":
        found |= {f"{gate}_emb.0.weight": (V, D) for gate in GATES[: 1 if config["tie_lstm_embs"] else 4]}
        found |= {f"{gate}_proj.{j}.weight": (D, width) for gate in GATES for j, width in enumerate((E, D))}
        return found | {f"{norm}_ln.0.{kind}": (D,) for norm in ("cell", "state") for kind in ("weight", "bias")}
    last = ".0" if "method" in config else ""
    for i in range(steps):
        found |= {f"emb.{i}{last}.weight": (V, D), f"ln.{i}{last}.weight": (D,), f"ln.{i}{last}.bias": (D,)}
    projections = 2 if config["tie_weights"] else HEADS
    return found | {f"proj.{i}{last}.weight": (D, D if i else E) for i in range(projections)}


def tensors(case):
    """A file of whole numbers, which every platform has alike."""
    made = {name: whole_numbers(shape, (3, i)) for i, (name, shape) in enumerate(sorted(shapes(case).items()))}
    return {name: x + ("ln" in name and name.endswith("weight")) for name, x in made.items()}


def copied(case, made):
    """The same file with every name that `state_dict` has for a shared parameter."""
    copies = dict(made)
    if CONFIGS[case].get("method") == "sum_lstm":
        copies |= {f"{gate}_emb.0.weight": made["forget_emb.0.weight"] for gate in GATES}
        return copies | {f"head.{i}.weight": made["head.0.weight"] for i in range(HEADS)}
    for name, x in made.items():
        part, number, rest = name.split(".", 2)
        later = range(1, HEADS) if number == "0" and part != "proj" else range(2, HEADS) if number == "1" else ()
        copies |= {f"{part}.{i}.{rest}": x for i in later}
    return copies


def target():
    return toy(TARGET, target_params())


def target_params():
    return jax.tree.map(lambda x: jnp.asarray(whole_numbers(x.shape, x.size)), TARGET.abstract())


def read(case, folder, made=None, **changes):
    """The drafter and its parameters from a file."""
    write(folder, CONFIGS[case] | changes, tensors(case) if made is None else made)
    name = drafter_of(folder)
    return load_head(folder, name, KINDS[name], target())


def states_of(drafter, own, features, tokens):
    """The states of all steps over a text: step i reads token t + 1 + i after feature t."""
    state, found = jnp.asarray(features), []
    for i in range(drafter.heads):
        width = tokens.shape[1] - i - 2
        state = drafter.advance(own, i, state[:, :width], jnp.asarray(tokens[:, i + 1 : i + 1 + width]))
        found.append(state)
    return found


ORACLE = {
    "ibm": {
        "logits": [
            [-2.04301, 1.905446, 1.683394, 0.098261, -1.111236], [-0.287132, -1.28929, 0.685524, 0.849489, 0.448429],
            [-0.209103, -0.266957, -0.094671, 0.205607, 0.277643],
        ],
    },
    "ibm, tied": {
        "logits": [
            [0.198403, 0.103187, -0.073688, -0.016648, -0.037902], [0.954271, 0.658465, 0.572501, -0.597703, 0.544597],
            [0.31538, 0.309679, 0.029502, -0.124363, 0.004033],
        ],
        "loss": 4.5023401,
        "gradients": {
            "emb.0.weight": [0.1980007, 0.0211376], "head.0.weight": [0.285071, 0.2307743],
            "ln.0.bias": [0.3401368, -0.1485034], "ln.0.weight": [0.1740083, -0.0204419],
            "proj.0.weight": [0.1997616, 0.0202776], "proj.1.weight": [0.1489109, 0.0521221],
        },
    },
    "arctic, sum_lstm": {
        "logits": [
            [0.020633, -1.359528, -1.922626, -1.045273, -0.045533], [-0.013317, -0.26936, -0.425306, -0.231444, -0.036585],
            [0.038662, -1.173752, -1.687769, -0.865205, -0.119958],
        ],
        "loss": 4.8049957,
        "gradients": {
            "cell_ln.0.bias": [0.1410297, 0.0518861], "cell_ln.0.weight": [0.1231315, -0.0742726],
            "cell_proj.0.weight": [0.1976036, 0.1365465], "cell_proj.1.weight": [0.0800559, 0.0005035],
            "forget_emb.0.weight": [0.2205132, -0.1543345], "forget_proj.0.weight": [0.0, 0.0],
            "forget_proj.1.weight": [0.0117563, -0.0035247], "head.0.weight": [0.7471897, -1.0586734],
            "input_proj.0.weight": [0.0367139, 0.0389832], "input_proj.1.weight": [0.0024055, -0.0021601],
            "output_proj.0.weight": [0.1057565, 0.0602612], "output_proj.1.weight": [0.0790611, 0.0447873],
            "state_ln.0.bias": [0.1123223, 0.1064485], "state_ln.0.weight": [0.1014011, -0.0609196],
        },
    },
    "arctic, four tables": {
        "logits": [
            [-0.738165, 0.330371, -0.071601, 0.347824, 0.210665], [-1.535121, 0.680615, -0.237848, 1.192362, 0.472171],
            [-1.500998, 0.6574, -0.226105, 1.145326, 0.44641],
        ],
    },
}  # fmt: skip
"""By file: the logits of the three steps after slot 2 of the second text, the sum of their cross entropies, and of every
parameter's gradient its norm and its product with `whole_numbers`.
"""
SAME = {"arctic, sum_rnn": "ibm, tied"}
"""Files of one network, of which another class of the authors had the same figures."""


@pytest.mark.parametrize("case", but_slow(CONFIGS, *(case for case in CONFIGS if case != "ibm")))
def test_distributions_are_those_of_the_authors_code(case, tmp_path):
    drafter, own = read(case, tmp_path)

    def dists(own):
        states = states_of(drafter, own, FEATURES, TOKENS)
        return [drafter.dist(own, i, state)[1, 2] for i, state in enumerate(states)]

    found = jax.jit(dists)(own)
    np.testing.assert_allclose(found, ORACLE[SAME.get(case, case)]["logits"], atol=2e-5)


def as_file(case, grads):
    """Gradients by the names of the file."""
    found = {f"head.{i}.weight": head["kernel"].T for i, head in enumerate(grads["heads"])}
    if CONFIGS[case].get("method") == "sum_lstm":
        tables = np.split(grads["embed"]["embedding"], len(grads["embed"]["embedding"][0]) // D, axis=1)
        found |= {f"{gate}_emb.0.weight": table for gate, table in zip(GATES, tables, strict=False)}
        for j, proj in enumerate(grads["proj"]):
            each = np.split(proj["kernel"], 4, axis=1)
            found |= {f"{gate}_proj.{j}.weight": x.T for gate, x in zip(GATES, each, strict=True)}
        for name in ("cell", "state"):
            norm = grads[f"{name}_norm"]
            found |= {f"{name}_ln.0.weight": norm["scale"], f"{name}_ln.0.bias": norm["bias"]}
        return found
    last = ".0" if "method" in CONFIGS[case] else ""
    found |= {f"emb.{i}{last}.weight": table["embedding"] for i, table in enumerate(grads["embeds"])}
    found |= {f"proj.{i}{last}.weight": proj["kernel"].T for i, proj in enumerate(grads["proj"])}
    for i, norm in enumerate(grads["norms"]):
        found |= {f"ln.{i}{last}.weight": norm["scale"], f"ln.{i}{last}.bias": norm["bias"]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ibm, tied", "arctic, sum_lstm"])
def test_gradients_are_those_of_the_authors_loss(case, tmp_path):
    """Of the sum of the steps' cross entropies. The authors' code leaves out each text's last places; here each step has all
    that it can learn from, and so it had for these figures.
    """
    drafter, own = read(case, tmp_path)
    kind = TrainLSTMSpeculator if isinstance(drafter, LSTMSpeculator) else TrainMLPSpeculator
    objective = kind(drafter, **kind.presets["paper"])
    assert objective.divergence == CrossEntropy("text") and objective.decay == 1
    output = Output(None, final=jnp.asarray(FEATURES))
    batch = Batch(jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool), output=output)
    run = lambda own: objective.loss(own, target_params(), batch, jax.random.key(0))
    (loss, _), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(own)
    assert float(loss) == pytest.approx(ORACLE[case]["loss"], abs=1e-5)
    found = {name: np.asarray(x) for name, x in as_file(case, jax.device_get(grads)).items()}
    assert sorted(found) == sorted(shapes(case))
    for i, name in enumerate(sorted(found)):
        along = (found[name] * whole_numbers(found[name].shape, (4, i))).sum()
        np.testing.assert_allclose([np.linalg.norm(found[name]), along], ORACLE[case]["gradients"][name], atol=1e-5)


def test_the_weight_of_tokens():
    assert token_weight(3, 4096) == pytest.approx(20.554837 / 0.890899, rel=1e-6)
    assert token_weight(4, 4096) == pytest.approx(19.684922, rel=1e-6)


def test_one_step_by_hand():
    """A step of each kind with two numbers, worked out on paper."""
    norm, weight = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}, token_weight(3, 2)
    assert weight == pytest.approx(0.509825, abs=1e-6)
    table = np.asarray([[0, 0], [1, -1]], np.float32)
    token, embed, four = (jnp.asarray(x) for x in (np.ones((1, 1), np.int32), table, np.tile(table, (1, 4))))
    numbers = np.asarray([[0.5, -1, 2, 0, 1, 1, 0.3, -0.2], [0.0] * 8], np.float32)

    @jax.jit
    def steps(one, cell):
        lstm = lambda table, cell: lstm_state(
            {"kernel": numbers}, {"embedding": table}, norm, norm, one, cell, token, weight
        )
        both = scaled(one - 2 * jnp.flip(one))
        mlp = mlp_state({"kernel": np.eye(2, dtype=np.float32)}, {"embedding": embed}, norm, both, token, weight)
        return mlp, lstm(embed, cell), lstm(four, cell), lstm(embed, None), lstm(embed, jnp.zeros_like(cell))

    given = np.asarray([[[1.0, 0.0]]], np.float32), np.asarray([[[0.1, -0.3]]], np.float32)
    mlp, lstm, same, first, empty = (x[0, 0] for x in steps(*given))
    np.testing.assert_allclose(mlp, (0.626895, -0.141728), atol=2e-6)
    np.testing.assert_allclose(lstm, (1.056867, -0.047252, 0.915443, -0.115720), atol=2e-6)
    np.testing.assert_allclose(same, lstm, atol=1e-6)
    np.testing.assert_allclose(first, empty, atol=1e-6)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_file_may_have_a_prefix_and_copies(case, tmp_path):
    drafter, own = read(case, tmp_path / "a")
    made = (
        copied(case, tensors(case)) if CONFIGS[case]["tie_weights"] and case != "arctic, four tables" else tensors(case)
    )
    assert len(made) > len(tensors(case)) or case in ("ibm", "arctic, four tables")
    again, same = read(case, tmp_path / "b", {f"speculator.{name}": x for name, x in made.items()})
    assert again == drafter and drafter.name == drafter_of(tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, own, same)
    for name, x in as_file(case, jax.device_get(own)).items():
        np.testing.assert_array_equal(x, tensors(case)[name])


@pytest.mark.parametrize(
    "case,changes,edit,message",
    [
        ("ibm", {}, lambda t: t.pop("proj.2.weight"), r"missing proj.2.weight \[4, 4\]"),
        ("ibm", {}, lambda t: t.update({"ln0.weight": np.ones(E, np.float32)}), r"unknown ln0.weight \[6\]"),
        ("ibm", {"emb_dim": 8}, None, "emb_dim: the head is 8 wide and 'toy' 6: it belongs to another target"),
        ("ibm", {"vocab_size": 7}, None, "the head reads 7 tokens, 'toy' has 5: it belongs to another target"),
        ("ibm", {"inner_dim": 0}, None, r"emb.0.weight has shape \[5, 4\], expected \[5, 6\]"),
        ("ibm", {"n_predict": 0}, None, "n_predict is 0, and a head drafts at least one token"),
        ("ibm", {"n_predict": "three"}, None, "n_predict is 'three', and a head drafts at least one token"),
        ("ibm", {"emb_dim": None}, None, "emb_dim must be a width, not None"),
        ("arctic, sum_rnn", {"inner_dim": "wide"}, None, "inner_dim must be a width, not 'wide'"),
        ("ibm", {"frob": 1}, None, "unknown flag 'frob'"),
        (
            "ibm, tied",
            {},
            lambda t: t.update({"emb.2.weight": 2 * t["emb.0.weight"]}),
            "emb.2.weight differs from emb.0.weight, and the file says that they are one",
        ),
        ("arctic, sum_rnn", {"inner_dim": "4.4"}, None, "inner_dim is '4.4': only heads with one layer in each step"),
        ("arctic, sum_rnn", {"emb_dim": "8"}, None, "emb_dim is '8' and inner_dim '4': their vectors are added"),
        ("arctic, sum_lstm", {"tie_weights": False}, None, "tie_weights is false, but the steps of an LSTM speculator"),
        ("arctic, sum_lstm", {}, lambda t: t.pop("output_proj.1.weight"), r"missing output_proj.1.weight \[4, 4\]"),
        ("arctic, four tables", {}, lambda t: t.pop("cell_emb.0.weight"), r"missing cell_emb.0.weight \[5, 4\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(case, changes, edit, message, tmp_path):
    made = tensors(case)
    if edit is not None:
        edit(made)
    with pytest.raises(ModelError, match=message):
        read(case, tmp_path, made, **changes)


def test_a_file_is_for_one_of_the_two(tmp_path):
    for case, name, other in (("arctic, sum_lstm", "mlp", "lstm"), ("ibm", "lstm", "mlp")):
        folder = write(tmp_path / name, CONFIGS[case], tensors(case))
        with pytest.raises(ModelError, match=f"is for {other}_speculator, and {name}_speculator reads"):
            load_head(folder, f"{name}_speculator", KINDS[f"{name}_speculator"], target())
    folder = write(tmp_path / "odd", CONFIGS["ibm"] | {"method": "sum_gru"}, tensors("ibm"))
    with pytest.raises(ModelError, match="'sum_gru' is unknown: known are sum_rnn and sum_lstm"):
        load_head(folder, "mlp_speculator", MLPSpeculator, target())
    with pytest.raises(ModelError, match="n_predict is missing"):
        bare = {key: value for key, value in IBM.items() if key != "n_predict"}
        load_head(write(tmp_path / "bare", bare, tensors("ibm")), "mlp_speculator", MLPSpeculator, target())


def test_a_chain_has_as_many_tokens_as_the_head_was_trained_for(tmp_path):
    """Of a published file; steps that share weights may go on."""
    config = CONFIGS["ibm, tied"] | {"n_predict": 5, "top_k_tokens_per_head": [1] * 5}
    longer = write(tmp_path / "a", config, tensors("ibm, tied"))
    drafter, _ = build_drafter(f"mlp_speculator:model={longer}", target())
    assert drafter.expander == Chain(5) and drafter.weight == token_weight(5, D)
    drafter, _ = build_drafter(f"mlp_speculator:model={longer},length=7", target())
    assert drafter.expander == Chain(7)
    own = write(tmp_path / "b", CONFIGS["ibm"], tensors("ibm"))
    assert build_drafter(f"mlp_speculator:model={own}", target())[0].expander == Chain(3)
    with pytest.raises(ValueError, match="mlp_speculator: a tree of depth 4 needs as many heads, there are 3"):
        build_drafter(f"mlp_speculator:model={own},length=4", target())
    assert MLPSpeculator(heads=5).expander == Chain(5) == LSTMSpeculator(heads=5).expander
    assert (MLPSpeculator(heads=1).deepest, LSTMSpeculator(heads=1).deepest) == (1, math.inf)


@pytest.mark.parametrize("case", but_slow(CONFIGS, *(case for case in CONFIGS if case != "arctic, sum_lstm")))
def test_every_path_of_a_tree_has_states_of_its_own(case, tmp_path):
    """Each node's children are the likeliest tokens after its own path, computed alone."""
    drafter, own = read(case, tmp_path)
    tree = Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)))
    drafter = dataclasses.replace(drafter, expander=tree)
    tokens, length, feature = jnp.asarray([[3, 1], [2, 4]]), jnp.asarray([2, 2]), jnp.asarray(FEATURES[:, 0])
    sampler = Sampler(row_keys(0, ["a", "b"]), tokens, length, length > 0, SamplingArrays.make(2, temperature=0.0))
    view = View(tokens, length, length > 0, None, max_depth=3)
    params = {"target": target_params(), "draft": own}
    state = FeatureDraft(None, length - 1, feature)
    drafted = jax.jit(lambda params: drafter.propose(params, state, view, sampler).tree)(params)
    parents = tree.topology.parents
    paths = np.zeros((2, len(parents), tree.depth), np.int32)  # of every node, the root first
    for node in range(len(parents)):
        line = [node]
        while parents[line[0]] >= 0:
            line.insert(0, parents[line[0]])
        paths[:, node, : len(line)] = np.asarray(drafted.tokens)[:, line[: tree.depth]]

    def alone(own):
        above, found = jnp.broadcast_to(feature[:, None], (2, len(parents), E)), []
        for i in range(tree.depth):
            above = drafter.advance(own, i, above, jnp.asarray(paths[:, :, i]))
            found.append(drafter.dist(own, i, above))
        return found

    dists = jax.device_get(jax.jit(alone)(own))
    for row, node in itertools.product((0, 1), range(len(parents))):
        children = [n for n, parent in enumerate(parents) if parent == node]
        ranked = np.argsort(-dists[min(drafted.depth[row, node], tree.depth - 1)][row, node], kind="stable")
        wanted = ranked[[tree.topology.ranks[child] for child in children]].tolist()
        assert [int(drafted.tokens[row, child]) for child in children] == wanted, node


def test_fields_out_of_range_are_said():
    with pytest.raises(ValueError, match="lstm_speculator: heads must be at least 1 .*got heads=0, inner=0"):
        LSTMSpeculator(heads=0)
    with pytest.raises(ValueError, match="mlp_speculator: .*inner must not be negative, got heads=3, inner=-2"):
        MLPSpeculator(inner=-2)
