"""Prompts that are read on devices of their own: the same texts, one mesh for each part, and bad meshes in one line."""

import jax
import pytest

from specjax import Engine, models
from specjax.serve import disaggregated, slots
from specjax.serve.disaggregated import DisaggregatedEngine, disjoint

PROMPTS = [[(7 * i + j * j) % 500 + 4 for j in range(3 + 5 * i)] for i in range(5)]


def texts(engine, **options):
    requests = [
        engine.request(ids, max_new_tokens=6, temperature=1.0, seed=3, ignore_eos=True, **options) for ids in PROMPTS
    ]
    return [record.tokens for record in engine.run(requests, batch_size=2)]


@pytest.fixture(scope="module")
def model():
    return models.load("tiny", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["prompt_lookup", "eagle3"])
def test_handed_rows_write_the_same_texts(model, drafter, monkeypatch):
    """Two rows decode five requests on two devices, which read no prompt; another device reads four of them ahead."""
    engine = DisaggregatedEngine(model, drafter=drafter, mesh="model=2", prefill_mesh="model=1")
    own = {device.id for device in jax.devices()[:2]}
    where, ahead = [], []
    insert, begin = slots.decoding.insert, disaggregated.Reader.read_ahead

    def noted(decoder, params, state, *rest, **more):
        where.append({device.id for device in state.tokens.devices()})
        return insert(decoder, params, state, *rest, **more)

    def counted(self, slots, requests, keys, prefix):
        before = len(self._ahead)
        begin(self, slots, requests, keys, prefix)
        ahead.append(len(self._ahead) - before)

    monkeypatch.setattr(slots.decoding, "insert", noted)
    monkeypatch.setattr(disaggregated.Reader, "read_ahead", counted)
    found = texts(engine)
    assert where == [{jax.devices()[2].id}] * 5 and not own & where[0]
    assert sum(ahead) == 5 and sum(now for now in ahead[1:] if now) == 3  # two enter at once, three while others decode
    monkeypatch.undo()
    assert found == texts(Engine(model, drafter=drafter))


@pytest.mark.slow
def test_a_shared_prefix_and_completions_of_one_prompt(model):
    shared = PROMPTS[3]
    found = []
    for engine in (
        DisaggregatedEngine(model, drafter="draft", mesh="data=2,model=2", prefill_mesh="model=2"),
        Engine(model, drafter="draft"),
    ):
        asked = [engine.request([*shared, *ids], max_new_tokens=5, temperature=1.0, seed=1) for ids in PROMPTS]
        asked += [engine.request(shared + [9], max_new_tokens=5, temperature=1.0, seed=2, sample=n) for n in range(3)]
        named = {"max_new_tokens": 5, "temperature": 1.0, "id": "a"}  # two prompts, and one twice, with one noise
        asked += [engine.request([*shared, *ids], **named) for ids in (PROMPTS[1], PROMPTS[2], PROMPTS[2])]
        found.append([record.tokens for record in engine.run(asked, batch_size=2, shared_prefix=True)])
    assert found[0] == found[1]


def test_bad_meshes_are_said_in_one_line(model):
    devices = jax.devices()
    with pytest.raises(ValueError, match="asks for 5 devices and 4 are left"):
        disjoint("model=4", "model=5")
    with pytest.raises(ValueError, match="the meshes share 1 devices"):
        disjoint(jax.sharding.Mesh(devices[:2], ("model",)), jax.sharding.Mesh(devices[1:3], ("model",)))
    with pytest.raises(ValueError, match="give mesh and prefill_mesh"):
        disjoint("model=2", None)
    with pytest.raises(ValueError, match="does not hand over rows of prompts"):
        DisaggregatedEngine(model, "beam:num_beams=2", mesh="model=1", prefill_mesh="model=1")
