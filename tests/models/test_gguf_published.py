"""Models that others published, from packages of the index: SmolLM2-135M-Instruct (Q4_1) and Gemma 3 270M (Q4_K_M).

With `SPECJAX_REAL_MODELS=1` a missing SmolLM2 is a failure; `.ci/run` sets it. Figures are transformers' (5.24), in float32.
"""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest

import specjax
from specjax import models
from specjax.jobs import datastore
from specjax.models import ModelError
from specjax.models.gguf import finding, header

pytestmark = [pytest.mark.slow, pytest.mark.covers("gguf", "models", "smollm2", "finding", "vocabulary", "tensors")]
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@functools.cache
def model(name):
    """The model, or a skip that says how to get it."""
    try:
        file = finding.installed(name)
    except ModelError as error:
        if os.environ.get("SPECJAX_REAL_MODELS") and name == "smollm2":
            raise
        pytest.skip(str(error))
    return models.load(file)


def test_smollm2_answers():
    (record,) = specjax.generate(model("smollm2"), ["What is the capital of France?"], chat=True, max_new_tokens=24)
    assert record.text == "The capital of France is Paris."


def test_a_datastore_of_its_tokens(tmp_path):
    """A text that is in the store is drafted from there, word for word."""
    text, asked = "The capital of France is Paris.", "What is the capital of France?"
    assert datastore.build([text, "Rome is in Italy."], "smollm2", str(tmp_path)) == (2, 12)
    (record,) = specjax.generate(
        model("smollm2"), [asked], chat=True, drafter=f"rest:datastore={tmp_path}", max_new_tokens=24
    )
    assert record.text == text and record.tokens_per_step > 1.5


CHATS = {
    "What is the capital of France?": "504 3575 282 4649 314 7042 30 2",
    "Write a haiku about the sea.": "504 6147 282 260 3426 28 253 13879 6122 28 198 49 9154 303 5082 282 260 10393 28 198 49 "
    "13151 282 260",
    "What is 12 times 7?": "33 34 1711 216 39 314 253 8170 1732 338 3445 17385 284 7573 30 533 6530 28 645 346 457 253 17385 "
    "282",
    "List three fruits.": "4590 359 1296 5574 338 359 3468 327 253 2458 284 8609 2714 42 1116 33 30 12619 12310 42 1069 359 "
    "904 281",
    "Translate to French: good morning": "46719 393 271 14047 24583 30 198 198 788 3432 28 260 8715 476 46719 393 271 14047 "
    "24583 18 18419 288 476 57",
    "def fib(n):": "3725 5367 198 1604 3987 24 94 727 472 585 304 10204 216 32 42 448 1003 216 32 472 4698 304 1758 216",
}
"""Answers to the end of a text, or of 24 tokens."""
RAW = {
    "The capital of France is": "506 5279 529 506 2891 529 7001 236761 1030 563 506 7488 3207 528 7001 532 506 1855 7488 3207 "
    "528 3879 236761 1030",
    "Once upon a time": "236764 993 691 496 2268 3953 7489 60708 236761 2625 691 496 1401 6538 3953 236764 532 1304 9312 531 "
    "1441 607 1116 4690",
    "1, 2, 3, 4, 5,": "236743 236825 236764 236743 236832 236764 236743 236828 236764 236743 236819 236764 236743 236770 "
    "236771 236764 236743 236770 236770 236764 236743 236770 236778 236764",
    "def fib(n):": "107 140 584 538 1251 236743 236771 236787 107 144 2060 236743 236771 107 140 36208 538 1251 236743 236770 "
    "236787 107 144 2060",
    "Good morning in French is": "496 3658 600 563 1456 531 9779 506 8178 529 1646 528 496 1535 17282 236761 1030 563 496 3658 "
    "600 563 1456 531",
    "The sea is": "496 1822 1977 531 11540 236764 840 625 740 577 496 3103 10887 528 506 7208 236761 108 818 7208 3409 563 496 "
    "1822",
}
CASES = {"smollm2": (CHATS, True), "gemma3-270m": (RAW, False)}


@pytest.mark.parametrize("name", CASES)
def test_greedy_texts(name):
    prompts, chat = CASES[name]
    records = specjax.generate(model(name), list(prompts), chat=chat, max_new_tokens=24)
    for record, ids in zip(records, prompts.values(), strict=True):
        assert list(record.tokens) == [int(token) for token in ids.split()]


@functools.cache
def written(drafter):
    """One greedy text and one that is drawn."""
    greedy, drawn = list(CHATS)[:2]
    prompts = [{"prompt": greedy, "temperature": 0.0}, {"prompt": drawn, "temperature": 0.8}]
    records = specjax.generate(model("smollm2"), prompts, chat=True, drafter=drafter, max_new_tokens=24, seed=3)
    return [list(record.tokens) for record in records]


@pytest.mark.parametrize("drafter", ("prompt_lookup", "token_recycling", "stand", "lookahead"))
def test_drafters_without_training_write_its_text(drafter):
    assert written(drafter)[0] == [int(token) for token in next(iter(CHATS.values())).split()]
    assert written(drafter) == written("none")


FOX = {  # of "The quick brown fox jumps over the lazy dog." the log-probability of each token after those before it
    "smollm2": ("504 2365 6354 16438 27003 690 260 23790 2767 30",
                "-14.3089 -6.2765 -1.4159 -7.0419 -0.0050 -2.6959 -2.4759 -0.1117 -1.7731"),
    "gemma3-270m": ("2 818 3823 8864 37423 38167 1024 506 31770 4799 236761",
                    "-2.9374 -12.0686 -7.0173 -0.3665 -0.8765 -0.0975 -0.0340 -0.4900 -0.2060 -1.0495"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOX)
def test_log_probabilities(name):
    first, *others = [int(token) for token in FOX[name][0].split()]
    (found,) = specjax.score(model(name), [[first]], [others])
    np.testing.assert_allclose(found.logprobs, [float(x) for x in FOX[name][1].split()], atol=3e-4)


def test_what_the_header_says():
    """Read by hand, and by gguf's reader."""
    file = model("smollm2").path
    found = header.read(file)
    assert len(found.tensors) == 272 and len(found.metadata) == 33
    table, queries = found.tensors["token_embd.weight"], found.tensors["blk.0.attn_q.weight"]
    assert (table.kind.name, table.shape, table.offset) == ("Q8_0", (49152, 576), 1785664)
    assert (queries.kind.name, queries.shape, queries.offset) == ("Q4_1", (576, 576), 33806656)
    params = model("smollm2").params["layers"][3]
    q, k, v = (np.asarray(params["attention"][name]["kernel"]) for name in "qkv")
    np.testing.assert_allclose(q[:3, 0], [0.077911376953125, 0.152801513671875, -0.10931396484375])
    for matrix, total in ((q, -96.36239624), (k, -52.82200622), (v, -32.29008484)):
        np.testing.assert_allclose(matrix.sum(dtype=np.float64), total, rtol=1e-6)


TEXTS = {
    "smollm2": {
        "Hello world": "19556 905", "  two  spaces\n\n\tTab": "216 827 216 5600 1116 197 30064",
        "I'm 12345 years, don't!": "57 5248 216 33 34 35 36 37 929 28 1326 982 17",
        "I'LL SHOUT'S": "57 23 16421 334 21953 23 67", "x=1;\r\ny += 22": "104 45 33 43 201 198 105 4519 216 34 34",
        "naïve café 日本語 🙂": "3546 46494 37366 17097 241 115 40993 179 120 248 47526", " ①": "216 173 235 250",
    },
    "gemma3-270m": {
        "Hello world": "2 9259 1902", "  two  spaces\n\n\tTab": "2 138 13498 138 35220 108 255968 7874",
        "I'm 12345 years, don't!": "2 236777 236789 236757 236743 236770 236778 236800 236812 236810 1518 236764 1537 236789 "
        "236745 236888",
        "<start_of_turn>user\nhi<end_of_turn>\n": "2 105 2364 107 2202 106 107", "<h1>hi</h1>": "2 184 2202 191",
        "a\n\n\nb": "2 236746 109 236763",
    },
}  # fmt: skip
ENDS = {"smollm2": (2, 0), "gemma3-270m": (1, 106)}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_cut_as_llama_cpp_cuts_them(name):
    own = model(name)
    assert {text: own.tokenizer.encode(text) for text in TEXTS[name]} == {
        text: [int(token) for token in ids.split()] for text, ids in TEXTS[name].items()
    }
    assert all(
        own.tokenizer.decode(own.tokenizer.encode(text), skip_special_tokens=True) == text for text in ("Tab  1", "é")
    )
    assert own.eos_ids == ENDS[name]


def asked():
    """The first questions of twelve prompts of public benchmarks, or of our own where those are not here."""
    file = DATA / "spec_bench" / "question.jsonl"
    if not file.is_file():
        return [*CHATS]
    lines = file.read_text().splitlines()
    texts = [json.loads(line)["turns"][0] for line in lines[:: max(1, len(lines) // 40)]]
    return [text for text in texts if len(text) < 600][:12]


def test_texts_and_log_probabilities_are_those_of_transformers():
    """Of a greedy text every token is the likeliest after those before it, to transformers' own reader of the file."""
    own, prompts = model("smollm2"), asked()
    torch, theirs = of_transformers(own.path)
    records = specjax.generate(own, prompts, chat=True, max_new_tokens=16, logprobs=True)
    for prompt, record in zip(prompts, records, strict=True):
        ids = [*own_ids(own, prompt), *record.tokens]
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0, -len(record.tokens) - 1 : -1].float()
        assert logits.argmax(-1).tolist() == list(record.tokens)
        wanted = logits.log_softmax(-1).max(-1).values.numpy()
        np.testing.assert_allclose(record.logprobs, wanted, atol=2e-3)


def of_transformers(file):
    """torch, and transformers' own reading of a file."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate: pip install accelerate")
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": file.name, "dtype": torch.float32}
    return torch, AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()


def test_gemma_reads_on_past_its_window():
    """Of 512 tokens."""
    own = model("gemma3-270m")
    torch, theirs = of_transformers(own.path)
    ids = own.tokenizer.encode(" ".join(f"{i} times {i} is {i * i}." for i in range(1, 90)))[:700]
    assert len(ids) == 700
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].float()
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    (found,) = specjax.score(own, [ids[:1]], [ids[1:]])
    np.testing.assert_allclose(found.logprobs, wanted, atol=2e-3)


def own_ids(own, prompt):
    """A prompt's ids."""
    said = [{"role": "user", "content": prompt}]
    text = own.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return own.tokenizer.encode(text, add_special_tokens=False)
