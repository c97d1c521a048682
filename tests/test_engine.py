"""Plausible input of the Python API that cannot be used: one clear ValueError each."""

import collections
import contextlib
import dataclasses
import logging
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFT, TARGET, params

import specjax
from specjax import models
from specjax.decode import Speculate
from specjax.decode.speculate import usual_drafter
from specjax.draft import ModelDrafter
from specjax.models import tokenizer
from specjax.models.text import encoded
from specjax.search.stepwise import Asked
from specjax.serve import call as call_module
from specjax.serve.engine import Engine
from specjax.serve.prompts import read_prompts
from specjax.serve.request import Record
from specjax.serve.score import pair_up


@pytest.fixture(scope="module")
def model():
    return specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"drafter": ModelDrafter(DRAFT)}, "needs its parameters"),
        ({"drafter": (ModelDrafter(DRAFT),)}, "pair"),
        ({"prompts": [None]}, "a prompt is"),
        ({"prompts": [[]]}, "empty"),
        ({"prompts": [[1, 500]]}, "outside the vocabulary"),
        ({"prompts": [[1] * 128]}, "capacity"),
        ({"dtype": "foo"}, "unknown dtype"),
        ({"mesh": 2}, "a mesh is"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ),
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(model, **{"prompts": [[1, 2, 3]], **options})


@pytest.mark.slow
def test_none_is_plain_and_dtype_casts(model):
    record = specjax.generate(model, [[1, 2, 3]], drafter=None, max_new_tokens=4, dtype="bfloat16")[0]
    assert record.steps == record.new_tokens == 4


def test_prompts_in_every_form(model, monkeypatch):
    """One program: all of them have the same shapes."""
    go = lambda prompts, **options: specjax.generate(
        model, prompts, drafter="none", max_new_tokens=4, batch_size=2, **options
    )
    alone = go([[1, 2, 3], [4, 5]], temperature=0.5)
    own = [{"prompt": [1, 2, 3], "temperature": 0.5}, {"prompt": [4, 5], "id": None, "temperature": 0.5}]
    assert [r.tokens for r in go(own)] == [r.tokens for r in go(p for p in own)] == [r.tokens for r in alone]
    assert [r.tokens for r in go((tuple(ids) for ids in ([1, 2, 3], [4, 5])), temperature=0.5)] == [
        r.tokens for r in alone
    ]
    named = go([{"prompt": [1], "id": 7, "seed": 3, "max_new_tokens": 2}, [2]])
    assert [(r.id, r.new_tokens) for r in named] == [(7, 2), (None, 4)]
    assert go([{"prompt": [1], "id": "7", "seed": 3, "max_new_tokens": 2}, [2]])[0].tokens == named[0].tokens
    two = go(np.asarray([1, 2, 3]), temperature=0.5, num_return_sequences=2)
    assert [r.sample for r in two] == [0, 1] and alone[0].sample is None
    assert two[0].tokens == alone[0].tokens != two[1].tokens
    shown = []
    monkeypatch.setattr(call_module, "record_bar", bar_into(shown))
    monkeypatch.setattr(call_module, "bar_fits", lambda: True)
    go([[1, 2, 3]])
    go([[1, 2, 3], [4, 5]], progress=False)
    assert shown == []
    go([[1, 2, 3], [4, 5]])
    assert shown[0] == 2 and sum(count for count, _ in shown[1:]) == 2 and "tokens per step" in shown[-1][1]
    monkeypatch.undo()
    assert call_module.bar_fits() is False
    with jax.default_prng_impl("rbg"):  # the user's own choice is not ours
        assert [r.tokens for r in go([[1, 2, 3], [4, 5]], temperature=0.5)] == [r.tokens for r in alone]
    assert repr(alone[0]).startswith(f"Record([1, 2, 3] -> {alone[0].tokens!r}, length, 4 tokens in ")
    assert repr(Record.failed("x" * 100, "no")) == "Record('xxxxxxxxxxxxxxxxxxx...xxxxxxxxx' -> [], no)"
    assert repr(Engine(model, drafter="none")) == "Engine('toy', NoDrafter, float32)"


class Pieces:
    """A tokenizer of the toy's tokens: letters, halves of an umlaut, and a special token."""

    def decode(self, ids, skip_special_tokens=False, **options):
        kept = [i for i in ids if not (skip_special_tokens and i % 5 == 0)]
        named = lambda i: (
            b"<s>" if i % 5 == 0 else b"\xc3\xbc"[i % 2 : i % 2 + 1] if i % 5 == 1 else bytes([97 + i % 26])
        )
        return b"".join(map(named, kept)).decode(errors="replace")


def test_text_comes_from_a_stream(model):
    """What `generate` gives, with stop strings in special tokens, and prompts that end within a character."""
    engine = Engine(dataclasses.replace(model, tokenizer=Pieces()), drafter="none")
    options = {"max_new_tokens": 40, "temperature": 3.0, "seed": 1}
    (record,) = specjax.generate(engine.model, [[3, 6]], drafter="none", **options)
    stream = engine.stream([3, 6], **options)
    pieces = list(stream)
    assert stream.record == record and "".join(pieces) == record.text and len(pieces) > 2
    assert not any("\ufffd" in piece[-1:] for piece in pieces[:-1])
    at = next(i for i in range(8, 40) if record.tokens[i] % 5 == 0 and record.tokens[i - 1] % 5 > 1)
    stop = chr(97 + record.tokens[at - 1] % 26) + "<s>"
    stopped = engine.stream([3, 6], stop=stop, **options)
    text = "".join(stopped)
    assert text == stopped.record.text and stopped.record.finish_reason == "stop"
    whole = Pieces().decode(stopped.record.tokens)
    assert whole.endswith(stop) and whole.count(stop) == 1 and stopped.record.new_tokens <= at + 1
    (own,) = specjax.generate(engine.model, {"prompt": np.int32([3, 6]), "stop": stop}, drafter="none", **options)
    assert own == stopped.record and own.prompt == [3, 6]
    with pytest.raises(ValueError, match="stop must be a string or a list of strings, got 5"):
        engine.request([3, 6], stop=5)
    with pytest.raises(ValueError, match="a stop string must not be empty"):  # before a piece is asked for
        engine.stream([3, 6], stop="")
    with pytest.raises(ValueError, match="toy has no tokenizer, so there is no text to stream"):
        Engine(model, drafter="none").stream([1])
    bad = dataclasses.replace(engine.model, params=jax.tree.map(lambda x: x * np.nan, model.params))
    with pytest.raises(RuntimeError, match="not finite"):
        list(Engine(bad, drafter="none").stream([3, 6], **options))


def bar_into(shown):
    @contextlib.contextmanager
    def record_bar(total):
        shown.append(total)
        yield lambda count, words: shown.append((count, words))

    return record_bar


MESSAGES = [{"role": "user", "content": "hi"}]


def test_what_is_one_prompt_and_what_several():
    one = ("def f():", [1, 2], np.arange(2), MESSAGES, {"prompt": "a"}, {"messages": MESSAGES})
    assert [len(read_prompts(prompt)) for prompt in one] == [1] * len(one)
    several = (["a", "b"], [[1], [2]], np.ones((2, 3), int), [MESSAGES, "a"], [{"prompt": "a"}, "b"], (p for p in "ab"))
    assert [len(read_prompts(prompts)) for prompts in several] == [2] * len(several)
    assert read_prompts(MESSAGES) == [(MESSAGES, {})] == read_prompts({"messages": MESSAGES})
    assert read_prompts([]) == []


class Tensor:
    """What torch's are for those who read them."""

    def __init__(self, values, where="cuda"):
        self.values, self.where, self.shape = values, where, np.shape(values)

    def detach(self):
        return self

    def cpu(self):
        return Tensor(self.values, "cpu")

    def __array__(self, dtype=None, copy=None):
        assert self.where == "cpu"
        return np.asarray(self.values)

    def __iter__(self):
        return (Tensor(value) for value in self.values)


LEFT = {"input_ids": [[0, 0, 5], [6, 7, 0]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}
RIGHT = {"input_ids": [[5, 0, 0], [6, 7, 0]], "attention_mask": [[1, 0, 0], [1, 1, 1]]}


@pytest.mark.parametrize("array", (np.asarray, jnp.asarray, Tensor, list))
def test_prompts_of_arrays_and_of_a_tokenizer(array, model):
    """Padding on either side is none of a prompt, and a real token that is the same id is."""
    ids = lambda prompts: [prompt for prompt, _ in read_prompts(prompts)]
    for given in (LEFT, RIGHT):
        encoding = collections.UserDict({name: array(rows) for name, rows in given.items()})  # as transformers' is one
        assert ids(encoding) == ids([{name: array(rows[i]) for name, rows in given.items()} for i in range(2)])
        assert ids(encoding) == [[5], [6, 7, 0]]
        assert [list(pair[0]) for pair in pair_up(encoding, [[1], [2]])] == [[5], [6, 7, 0]]
    assert ids(array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]] == ids([array([1, 2]), array([3, 4])])
    assert ids(array([1, 2])) == [[1, 2]] == ids({"input_ids": array([1, 2])}) == ids({"input_ids": array([[1, 2]])})
    assert ids({"prompt": array([1, 2])}) != [] and encoded(model, array([1, 2])) == (1, 2)
    assert encoded(model, {"input_ids": array([[0, 1, 2]]), "attention_mask": array([[0, 1, 1]])}) == (1, 2)


@pytest.mark.slow
def test_prompts_of_torch_and_transformers(model):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding(LEFT, tensor_type="pt")
    assert isinstance(encoding["input_ids"], torch.Tensor)
    assert [prompt for prompt, _ in read_prompts(encoding)] == [[5], [6, 7, 0]]
    assert [prompt for prompt, _ in read_prompts(torch.tensor([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    assert encoded(model, torch.tensor([1, 2], dtype=torch.int32)) == (1, 2)


@pytest.mark.parametrize(
    ("prompts", "said"),
    (
        (np.ones(3), "token ids are integers, and this is an array of float64"),
        (np.ones((2, 3, 4), int), r"one prompt \[N\] or several \[R, N\], N at least 1: this one is \[2, 3, 4\]"),
        (np.zeros(0, int), r"N at least 1: this one is \[0\]"),
        (jnp.asarray(5), r"N at least 1: this one is \[\]"),
        ({"input_ids": [[1]], "pixel_values": [[0.5]]}, "a prompt with input_ids cannot have 'pixel_values'"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask has another shape than input_ids"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "must be 1 over each prompt and 0 before or after"),
        ([np.ones((2, 3), int), [1]], "this is one prompt, and an array of 2 rows was given"),
        ({"prompt": "a", "max_tokens": 3, "max_new_tokens": 4}, "sets max_new_tokens differently"),
        ({"prompt": None, "messages": None}, "has one of prompt and messages"),
    ),
)
def test_prompts_that_do_not_say_what_they_are(prompts, said):
    with pytest.raises(ValueError, match=said):
        specjax.generate(None, prompts)


@pytest.mark.parametrize(
    ("model", "prompts", "said"),
    (
        (
            "def add(a, b):",
            None,
            "they come second, after the model; generate(None, 'def add(a, b):') completes that text",
        ),
        (3, None, "no prompts: they come second, after the model$"),
        (None, 5, "not 5"),
        (None, [{"prompt": "a", "colour": 1}], "no field 'colour'; it may have prompt, messages, id, suffix, stop, "),
        (None, [{"prompt": "a", "temprature": 1}], "no field 'temprature'; is temperature meant?"),
        (None, [{"prompt": "a", "messages": [{}]}], "one of prompt and messages"),
        (None, [{"prompt": "a", "id": 1.5}], "the id of a prompt is a string or an integer, not 1.5"),
    ),
)
def test_prompts_that_are_none(model, prompts, said):
    """Before any model is loaded."""
    with pytest.raises(ValueError, match=re.escape(said).replace(r"\$", "$")):
        specjax.generate(model, prompts)


def test_no_advice_about_torch(tmp_path, monkeypatch, capfd):
    """As transformers' own module does where torch is missing, one warns when it is imported."""
    utils = tmp_path / "transformers" / "utils"
    utils.mkdir(parents=True)
    (utils / "__init__.py").touch()
    (utils / "logging.py").write_text("get_verbosity = set_verbosity = set_verbosity_error = lambda *given: None\n")
    warns = "import logging\nlogging.getLogger(__name__).warning('PyTorch was not found')\nAutoTokenizer = AutoConfig = None\n"
    (tmp_path / "transformers" / "__init__.py").write_text(warns)
    (tmp_path / "tokenizer.json").write_text("{}")
    made = {"transformers", "transformers.utils", "transformers.utils.logging"}  # gone again afterwards
    for name in made | {name for name in sys.modules if name.startswith("transformers.")}:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(specjax.models.ModelError):  # nothing else is in this one
        tokenizer.load(tmp_path)
    assert "PyTorch" not in capfd.readouterr().err and not logging.getLogger("transformers").filters


def test_what_a_notebook_lists():
    """What users need, and nothing of what the package needs itself."""
    listed = set(dir(specjax))
    assert {"Engine", "load", "generate", "score", "search", "tasks", "train", "models", "viz", "__version__"} <= listed
    assert listed == {*specjax.__all__, "__version__"}
    machinery = {"annotations", "importlib", "os", "startup", "Path", "flags", "names", "settings", "TYPE_CHECKING"}
    assert not listed & machinery
    assert all(getattr(specjax, name) is not None for name in listed)
    assert specjax.load is models.load and specjax.Engine is Engine
    with pytest.raises(AttributeError, match="'specjax' has no attribute 'nosuch'"):
        _ = specjax.nosuch


def test_a_mesh_of_other_axes_is_refused(model):
    mesh = jax.make_mesh((8,), ("rows",))
    with pytest.raises(ValueError, match="data, model, context, or some of them; 'rows' is none of these"):
        specjax.generate(model, [[1, 2]], mesh=mesh)


def test_rejection_refuses_every_dynamic_tree(model):
    small = ModelDrafter(DRAFT, specjax.expand.TopK(k=1, depth=3, nodes=4))
    with pytest.raises(ValueError, match="takes chains"):
        specjax.generate(model, [[1, 2]], decode=Speculate((small, params()["draft"]), verifier="rejection"))


@pytest.mark.slow
def test_a_capacity_that_is_too_small_is_refused(model):
    """With the drafter's slack: the text must not depend on it. What is needed is enough."""
    engine = Engine(model, drafter="prompt_lookup:length=4")
    requests = [engine.request([1, 2, 3], max_new_tokens=6), engine.request([4], max_new_tokens=6)]
    with pytest.raises(
        ValueError, match="a capacity of 13 does not hold these requests: the longest one needs 14 slots, 5 of"
    ):
        engine.run(requests, capacity=13)
    assert [r.new_tokens for r in engine.run(requests, capacity=14)] == [6, 6]


def test_lists_that_nobody_sets_are_the_tokenizers(model):
    """The last token of each text, as text-generation-webui has it; an empty list is none, and so is no tokenizer."""
    with_words = Engine("tiny", drafter="none")
    options = {"dry_multiplier": 0.8, "xtc_probability": 0.5, "temperature": 1.0}
    request, words = with_words.request("a", **options), with_words.model.tokenizer
    assert [words.decode([token]) for token in request.dry_sequence_breakers] == ["\n", ":", '"', "*"]
    assert [words.decode([token]) for token in request.xtc_special_tokens] == ["\n"]
    assert with_words.request("a", **options, dry_sequence_breakers=[]).dry_sequence_breakers == []
    assert with_words.request("a").dry_sequence_breakers is None
    assert Engine(model, drafter="none").request([1], **options).dry_sequence_breakers is None
    asked = Asked.of([with_words.model], ["a"], 4, 0, options)
    assert asked.sampling["dry_sequence_breakers"] == request.dry_sequence_breakers


def test_the_usual_drafter_goes_by_the_rows():
    """On a CPU: one row looks up; several have the draft that is shipped for them, or none."""
    ours, other = models.abstract("tiny"), dataclasses.replace(models.abstract("tiny"), path=None)
    assert [usual_drafter(ours, rows) for rows in (1, 2, 8)] == ["prompt_lookup", "draft", "draft"]
    assert [usual_drafter(other, rows) for rows in (1, 2, 8)] == ["prompt_lookup", "none", "none"]
    assert Engine(ours, rows=8).drafter == "draft"
    assert (
        Engine(ours, rows=8, decode=Speculate(verifier="rejection")).drafter == Engine(ours).drafter == "prompt_lookup"
    )


def test_calls_of_few_prompts_share_their_programs(model, caplog):
    """Two, three and four prompts, of other lengths too; what a row says does not depend on how many there are."""
    prompts = [[1, 2, 3], [9, 8], [4, 4, 4, 4, 4], [7, 5]]
    compiled, texts = [], []
    for count in (2, 3, 4):
        caplog.clear()
        with jax.log_compiles():
            records = specjax.generate(model, prompts[:count], drafter="none", max_new_tokens=3 + count)
        compiled.append(sum(text.startswith("Compiling jit(") for text in caplog.messages))
        texts.append([record.tokens[:5] for record in records])
    assert compiled[0] > 0 and compiled[1:] == [0, 0]
    assert texts[0] == texts[1][:2] == texts[2][:2] and texts[1] == texts[2][:3]


def test_rows_and_buffers_come_in_few_sizes(model):
    engine = Engine(model, drafter="none")
    requests = [engine.request([1], max_new_tokens=1)] * 40
    slots = lambda batch_size: [engine.slots(requests[:count], batch_size) for count in (1, 2, 4, 5, 9, 40)]
    assert slots(8) == [1, 4, 4, 8, 8, 8]  # one prompt is alone, and no batch is larger than the user says
    assert slots(12) == [1, 4, 4, 8, 12, 12] and slots(3) == [1, 3, 3, 3, 3, 3]
    sizes = [engine.decoder.buffer(needed) for needed in (1, 128, 129, 257, 513, 1024, 1025, 2049)]
    assert sizes == [128, 128, 256, 512, 1024, 1024, 2048, 3072]
    assert [len(engine.keys(requests[:count])) for count in (1, 8, 9)] == [1, 8, 9]
    assert len({tuple(key) for key in engine.keys(requests)}) == 40  # equal prompts are told apart
