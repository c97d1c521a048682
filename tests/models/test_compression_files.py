"""Files that say which sublayers are left out, and which format each matrix has: EvoPress' formats."""

import jax
import numpy as np
import pytest
from support.shapes import changed, small

import specjax
from specjax.models import ModelError
from specjax.models.drop_config import read_drops, write_drops
from specjax.models.few_bits import is_quantised
from specjax.models.formats import PerMatrix, matrices, read_format
from specjax.models.llama import LlamaLM
from specjax.models.model_config import ExpertsConfig

PUBLISHED = {"attn": (10, 11, 12, 19, 20, 25, 26, 27), "mlp": (8, 9, 10, 11, 19, 25, 26, 28)}
"""The sublayers that EvoPress leaves out of Llama-3.1-8B at a quarter."""


def published():
    word = lambda i: "+".join(kind for kind, layers in PUBLISHED.items() if i in layers) or "none"
    return "".join(f"{word(i)}\n" for i in range(32))


def test_a_published_list_is_read_and_written_back(tmp_path):
    file = tmp_path / "layer_drop_config.txt"
    file.write_text(published() + "\n")
    drops = read_drops(file)
    assert drops == read_drops(tmp_path) and len(drops) == 32
    for which, layers in enumerate(PUBLISHED.values()):
        assert tuple(i for i, own in enumerate(drops) if own[which]) == layers
    write_drops(tmp_path / "new" / "copy.txt", drops)
    assert (tmp_path / "new" / "copy.txt").read_text() == published()


def test_a_list_of_other_words_is_refused_by_its_line(tmp_path):
    file = tmp_path / "drops.txt"
    with pytest.raises(ModelError, match="no list of sublayers at .*drops.txt.*evopress drops"):
        read_drops(file)
    file.write_text("none\nattention\n")
    with pytest.raises(ModelError, match="line 2: 'attention' is none of none, attn, mlp, attn"):
        read_drops(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="is no text"):
        read_drops(file)


LINES = {
    "model.layers.0.self_attn.q_proj": "4",
    "model.layers.0.mlp.up_proj": "8",
    "model.layers.1.mlp.up_proj": "16",
    "model.layers.1.mlp.down_proj": "fp8",
    "model.embed_tokens": "int4:group=32",
}


def written(tmp_path, lines=LINES):
    file = tmp_path / "bits.txt"
    file.write_text("".join(f"{name}: {word}\n" for name, word in lines.items()))
    return file


def test_each_matrix_has_the_format_of_its_line_and_the_others_none(tmp_path):
    plain = specjax.load("tiny-draft")
    form = str(read_format(str(written(tmp_path))))
    loaded = specjax.load("tiny-draft", weights=str(tmp_path / "bits.txt"))
    assert loaded.weights == form and form.startswith(str(tmp_path)) and ":digest=" in form
    kinds = {}
    whole = matrices(plain.params)
    for name, leaf in matrices(loaded.params).items():
        if not is_quantised(leaf):
            np.testing.assert_array_equal(leaf, whole[name])
            continue
        kinds[name] = str(leaf.stored.dtype), leaf.scale.shape
        word = {"4": "int4", "8": "int8"}.get(LINES[name], LINES[name])
        want = read_format(word).leaf(whole[name], -1 if name == "model.embed_tokens" else -2)
        jax.tree.map(np.testing.assert_array_equal, leaf, want)
    assert {name: kind for name, (kind, _) in kinds.items()} == {
        "model.layers.0.self_attn.q_proj": "int4", "model.layers.0.mlp.up_proj": "int8",
        "model.layers.1.mlp.down_proj": "float8_e4m3fn", "model.embed_tokens": "int4",
    }  # fmt: skip
    assert kinds["model.embed_tokens"][1] == (plain.lm.vocab_size, 128 // 32)
    again = specjax.load(plain, weights=form)
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_experts_are_named_one_by_one(tmp_path):
    lm = LlamaLM(changed(small(96, 64, 128, 1, 8, 4, 8), experts=ExpertsConfig(3, 2, 32)))
    lines = {f"model.layers.0.mlp.experts.{i}.up_proj": "8" for i in range(3)}
    shapes = read_format(str(written(tmp_path, lines))).shapes(lm.abstract())
    assert is_quantised(shapes["layers"][0]["mlp"]["experts"]["up"]["kernel"])
    assert not is_quantised(shapes["layers"][0]["mlp"]["experts"]["down"]["kernel"])
    for change in ({"model.layers.0.mlp.experts.1.up_proj": "4"}, {"model.layers.0.mlp.experts.1.up_proj": None}):
        other = {name: word for name, word in (lines | change).items() if word}
        with pytest.raises(ModelError, match=r"name all of model.layers.0.mlp.experts.0.up_proj to 2, in one format"):
            read_format(str(written(tmp_path, other))).shapes(lm.abstract())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"model.layers.0.mlp.up_proj": "3"}, "line 1: .* is no matrix with a format; .* 4, 8, 16 or one of int8"),
        ({"model.layers.0.mlp.up_proj": ""}, "line 1: .* is no matrix with a format"),
        ({"model.layers.0.mlp.up_proj": "int5"}, "unknown weights 'int5'"),
        (
            {"model.layers.0.mlp.up_proj": "8\nmodel.layers.0.mlp.up_proj: 4"},
            "line 2: model.layers.0.mlp.up_proj is there",
        ),
        (
            {"model.layers.7.mlp.up_proj": "8"},
            "names 1 matrices that the model lacks, such as model.layers.7.mlp.up_proj",
        ),
        ({"model.layers.0.mlp.up_proj": "int4:group=31"}, "groups of 31 inputs do not divide every matrix"),
    ],
)
def test_wrong_lines_are_refused(lines, said, tmp_path):
    with pytest.raises(ModelError, match=said):
        specjax.load("tiny-draft", weights=str(written(tmp_path, lines)))


def test_a_file_that_changed_is_refused(tmp_path):
    form = str(read_format(str(written(tmp_path))))
    assert isinstance(read_format(form), PerMatrix)
    written(tmp_path, {"model.layers.0.mlp.up_proj": "4"})
    with pytest.raises(ModelError, match="has changed: its digest is"):
        read_format(form)
    with pytest.raises(ModelError, match="or a file with a format for each matrix"):
        read_format(str(tmp_path / "nothing.txt"))


def test_a_few_layers_do_not_stand_for_layers_of_several_formats(tmp_path):
    from specjax.models import loading

    model = specjax.models.abstract("tiny-draft", weights=str(written(tmp_path)))
    with pytest.raises(ModelError, match="plan the whole model"):
        loading.with_layers(model, 1)
