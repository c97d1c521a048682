"""Several MTP layers (MiMo-V2-Flash), each for one depth, against passes by hand over the layers of transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.conformance import Rows, start, texts
from support.head_start import bindings, step
from support.tiny_sizes import MIMO_V2, SIZES, SLIDING

import specjax
from specjax.assembly.registry import build_drafter
from specjax.draft import MTP, NoDrafter, Proposal
from specjax.draft.heads.folder import read_head
from specjax.draft.mtp.objective import TrainMTP
from specjax.expand import Static
from specjax.models import ModelError
from specjax.serve.engine import Engine
from specjax.tree import Topology, Tree

WINDOW, MODULES, DEPTH, NEW = MIMO_V2["sliding_window"], 3, 5, 12
NORMS = ("enorm", "hnorm", "final_layernorm")


@functools.cache
def oracle():
    """A target of transformers, and for each module its layer and its own tensors, every parameter drawn."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind, config = transformers.MiMoV2FlashForCausalLM, transformers.MiMoV2FlashConfig
    dense = {"layer_types": [SLIDING] * MODULES, "mlp_layer_types": ["dense"] * MODULES, "num_hidden_layers": MODULES}
    main, parts = kind(config(**SIZES | MIMO_V2)).eval(), kind(config(**SIZES | MIMO_V2 | dense)).eval()
    size, own = SIZES["hidden_size"], []
    for _ in range(MODULES):
        norms = {name: 1 + 0.3 * torch.randn(size) for name in NORMS}
        own.append(norms | {"eh_proj": 0.2 * torch.randn(size, 2 * size)})
    with torch.no_grad():
        for model in (main, parts):
            for name, x in [*model.named_parameters(), *model.named_buffers()]:
                if x.ndim == 1 and "inv_freq" not in name:
                    x.copy_(0.3 * torch.randn(x.shape) + ("norm" in name))
    return main, parts, own


def write(folder):
    """The target's folder with the modules in it, under the names of the published one."""
    main, parts, own = oracle()
    main.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for i, layer in enumerate(parts.model.layers):
        at = f"model.mtp.layers.{i}"
        tensors |= {f"{at}.{name}.weight": x.numpy() for name, x in own[i].items()}
        for name, x in layer.state_dict().items():
            name = name.replace("post_attention", "pre_mlp").replace("sinks", "attention_sink_bias")
            tensors[f"{at}.{name}"] = x.numpy()
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def run(i, tokens, features):
    """Module i over a text's pairs of a feature `[T, E]` and a token: `[T, E]`."""
    import torch

    main, parts, own = oracle()
    normed = lambda x, name: torch.nn.functional.rms_norm(x, x.shape[-1:], own[i][name], main.config.rms_norm_eps)
    embeds = main.model.embed_tokens(torch.tensor(tokens))
    z = torch.cat([normed(embeds, "enorm"), normed(features, "hnorm")], dim=-1) @ own[i]["eh_proj"].T
    at = torch.arange(len(tokens))
    apart = at[:, None] - at[None]
    mask = torch.where((apart >= 0) & (apart < WINDOW), 0.0, -1e30)
    turned = parts.model.rotary_emb(z[None], at[None], SLIDING)
    out = parts.model.layers[i](z[None], attention_mask=mask[None, None], position_embeddings=turned)
    return normed(out[0], "final_layernorm")


def after(text, path):
    """Logits after a text and a path of drafts: of module i after i drafts, and below the last one of that on its outputs."""
    import torch

    main, *_ = oracle()
    with torch.no_grad():
        read = main(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, :-1]
        tokens, i = [*text[1:], *path], min(len(path), MODULES - 1)
        out = run(i, tokens[i : i + len(read)], read)
        for _ in path[i:]:
            read = torch.cat([read, out[-1:]])
            out = run(i, tokens[i : i + len(read)], read)
        return main.lm_head(out[-1]).numpy()


@dataclasses.dataclass(frozen=True)
class Told(MTP):
    """Proposes what the target will say, but for one token, whose depth follows from the text's length."""

    truth: tuple[tuple[int, ...], ...] = ()

    def propose(self, params, draft, view, sampler):
        at = view.length[:, None] + jnp.arange(DEPTH)[None]
        tokens = jnp.take_along_axis(jnp.asarray(self.truth), at, axis=1)
        tokens = jnp.where(jnp.arange(DEPTH)[None] == view.length[:, None] % 5, (tokens + 1) % 128, tokens)
        tokens = jnp.concatenate([view.root[:, None], tokens], axis=1)
        return Proposal(Tree.of(Topology.chain(DEPTH), tokens, jnp.ones(tokens.shape, bool)), draft)


@pytest.mark.slow
@pytest.mark.covers("mtp", "mimo_v2_flash")
def test_module_i_drafts_the_token_at_depth_i(tmp_path):
    """After prompts that are read in chunks, and after steps that accept some drafts and reject others."""
    target = specjax.models.load(write(tmp_path), dtype="float32")
    drafter, own = build_drafter("mtp:length=5", target)
    assert drafter.modules == MODULES and own.keys() == {"modules"}
    model = {"target": target.params, "draft": own}
    prompts = tuple(tuple(np.random.default_rng(n).integers(3, 128, n).tolist()) for n in (1, 2, 4, 11))
    rows = Rows(prompts, tuple(map(str, prompts)), ({},) * len(prompts), NEW + 2 * DEPTH)
    plain = specjax.speculative(target.lm, NoDrafter())
    state = specjax.decoder.run(plain, model, start(plain, rows, model=model, width=4, capacity=64))
    truth = tuple((*prompt, *more, *[0] * 64)[:64] for prompt, more in zip(prompts, texts(state), strict=True))
    told = specjax.speculative(target.lm, Told(**vars(drafter) | {"truth": truth}))
    dists = []

    class Watched(MTP):
        def logits(self, params, h):
            dists.append(super().logits(params, h))
            return dists[-1]

    @jax.jit
    def proposed(state):
        dists.clear()
        proposal = Watched(**vars(drafter)).propose(model, state.draft, *bindings(told, state))
        return proposal.tree.tokens, jnp.concatenate(dists, axis=1)

    state, lengths = start(told, rows, model=model, width=4, capacity=64), []
    for _ in range(4):
        tokens, logits = proposed(state)
        for row, length in enumerate(np.asarray(state.length)):
            if length > 1:  # before the first pair there is no output
                text, path = np.asarray(state.tokens)[row, :length].tolist(), tokens[row, 1:].tolist()
                for depth, draft in enumerate(path):
                    wanted = after(text, path[:depth])
                    np.testing.assert_allclose(logits[row, depth], wanted, atol=1e-4)
                    assert draft == wanted.argmax()
        lengths.append(np.asarray(state.length))
        state = step(told, model, state)
    assert len(set(np.diff(lengths, axis=0).ravel().tolist())) > 2
    static = Static.from_counts("2 | 2 1 | 1 0 2 | 1 1 0 | 1 1")
    tree = dataclasses.replace(drafter, expander=static)
    tree = jax.jit(lambda state: tree.propose(model, state.draft, *bindings(told, state)).tree)(state)
    text, tokens = np.asarray(state.tokens)[3, : int(state.length[3])].tolist(), np.asarray(tree.tokens)[3]
    paths = [[]]
    for token, parent, rank in zip(tokens[1:], static.topology.parents[1:], static.topology.ranks[1:], strict=True):
        assert token == np.argsort(-after(text, paths[parent]))[rank]
        paths.append([*paths[parent], int(token)])
    assert max(map(len, paths)) == DEPTH


@pytest.mark.slow
@pytest.mark.covers("mtp", "mimo_v2_flash")
@pytest.mark.parametrize("line", ("mtp", "mtp:expander=top_k,k=2,depth=5,nodes=9"))
def test_texts_are_those_of_plain_decoding(line, tmp_path):
    """Greedy and sampled, from the folder alone, with windows as rings."""
    target = specjax.models.load(write(tmp_path), dtype="float32")
    made = {}
    for drafter in ("none", line):
        engine = Engine(target, drafter=drafter)
        asked = [engine.request([5, 9, 11, 5, 9, t], max_new_tokens=40, temperature=t % 2) for t in (4, 7, 9)]
        made[drafter] = {str(record.prompt): record.tokens for record in engine.run(asked, batch_size=3)}
    assert made["none"] == made[line]


def test_modules_are_read_from_their_targets_folder(tmp_path):
    """As many as there are; their layers are the target's with a window, without experts."""
    target = specjax.models.load(write(tmp_path), dtype="float32")
    head = read_head(tmp_path, "mtp", MTP, target)
    assert (head.format, head.drafter.modules) == ("mimo-v2", MODULES)
    layer, near = head.drafter.config.layers[0], target.lm.config.layers[1]
    assert layer.mixer == near.mixer and layer.mixer.window == WINDOW and layer.feed == target.lm.config.dense
    _, _, own = oracle()
    np.testing.assert_array_equal(head.params["modules"][2]["fc"]["kernel"].T, own[2]["eh_proj"])
    with pytest.raises(ValueError, match="one MTP module is trained for every depth, not several"):
        TrainMTP(head.drafter)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.mtp.layers.1.self_attn.attention_sink_bias")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing model.mtp.layers.1.self_attn.attention_sink_bias \[8\]"):
        read_head(tmp_path, "mtp", MTP, target)
    one = {name: x for name, x in tensors.items() if not name.startswith(("model.mtp.layers.1", "model.mtp.layers.2"))}
    save_file(one, tmp_path / "model.safetensors")
    assert read_head(tmp_path, "mtp", MTP, target).drafter.modules == 1
