"""`python docs/pictures.py` draws the pictures of pictures.md and writes the text in it; needs 'specjax[plot]', and a minute.

The shipped models decode a few tokens here; speeds and acceptance are those that the folders of experiments hold.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import specjax
from specjax import viz
from specjax.bench.order import Row
from specjax.bench.order import unmask_order as written
from specjax.decode import Diffusion
from specjax.models import DEFAULT_MODEL
from specjax.serve.engine import Engine
from specjax.serve.text import user_turn
from specjax.sharding import make_mesh
from specjax.sharding.rules import placed, shardings

FOLDER = Path(__file__).resolve().parent
QUESTION = "A counter shows 24. Subtract 17. Add 9. What does the counter show? Work it out, then say the answer."
PROMPT = user_turn(QUESTION, chat=True)
WANTED = (
    "Python, one line: run(values) takes the numbers in values other than 25 and above 17 and returns the negative of each, as "
    "a list, only the first 3."
)
"""Of what the diffusion model is made for."""
TREE = "draft:expander=top_k,k=3,depth=4,nodes=12"
POLICIES = ("fixed", "threshold:threshold=0.5", "factor", "fixed:steps=8")
MESH = "data=2,model=2,context=2"
SHOWN = ("none", "prompt_lookup", "token_recycling", "draft", "medusa", "eagle2", "eagle3")


def tree() -> tuple[Any, str]:
    """The step of a text that accepted most."""
    engine = Engine(None, drafter=TREE)
    state = engine.start([engine.request(PROMPT, max_new_tokens=64, ignore_eos=True)])
    step, infos, words = jax.jit(engine.decoder.step), [], engine.model.tokenizer
    while not state.done.all():
        state, info = step(engine.params, state)
        infos.append(info)
    best = max(infos, key=lambda info: int(info.verdict.accepted[0]))
    return viz.token_tree(best, tokenizer=words), viz.text.token_tree(best, tokenizer=words)


def order() -> tuple[tuple[Any, str], tuple[Any, str]]:
    """A line a policy, and the words of the last one."""
    rows, name = [], f"{DEFAULT_MODEL}-diffusion"
    model = specjax.load(name)
    for policy in POLICIES:
        engine = Engine(model, decode=Diffusion(unmask=policy, cache="prefix"))
        request = engine.request(user_turn(WANTED, chat=True), max_new_tokens=32, ignore_eos=True)
        found, state = written(engine.decoder, engine.params, engine.start([request]))
        begin, end = len(request.ids), len(request.ids) + request.max_new_tokens
        rows.append(Row(policy, int(state.stats.steps[0]), tuple(found[0, begin:end].tolist())))
    words = [
        word.replace("\n", "\\n") for word in map(model.tokenizer.decode, [[i] for i in state.tokens[0, begin:end]])
    ]
    last = {rows[-1].decoder: rows[-1].order}
    return (
        (viz.unmask_order(rows), viz.text.unmask_order(rows)),
        (viz.unmask_order(last, words, columns=12), viz.text.unmask_order(last, words)),
    )


def committed(name: str) -> Any:
    """What a command printed, as the repository holds it."""
    return json.loads((FOLDER.parent / "experiments" / name).read_text())


def bench() -> dict[str, Any]:
    """Some rows of the committed comparison of drafters."""
    found = committed("drafters/greedy.json")
    return {**found, "rows": [row for row in found["rows"] if row["decoder"].partition(":")[0] in SHOWN]}


def times() -> dict[str, dict[str, float]]:
    """A step by the number of tokens that it verifies: what one of them takes, and what the others add."""
    cost = {int(nodes): ms / 1e3 for nodes, ms in committed("bench/step_cost.json")["step_ms"].items()}
    return {f"N = {nodes}": {"one token": cost[1], "the others": s - cost[1]} for nodes, s in cost.items()}


def cache() -> tuple[Any, Any]:
    """A decoder of the shipped target on a mesh, and its state as shapes."""
    engine, mesh = Engine(None, drafter="none"), make_mesh(MESH)
    shapes = jax.eval_shape(lambda params: engine.decoder.empty(params, 4, 256), engine.params)
    decoder = specjax.speculative(engine.model.lm, mesh=mesh)
    return decoder, placed(shapes, shardings(mesh, decoder.axes(shapes), shapes))


def both(name: str, *data: Any) -> tuple[Any, str]:
    """A picture and its text."""
    draw: Callable[..., Any] = getattr(viz, name)
    return draw(*data), getattr(viz.text, name)(*data)


def main() -> None:
    """Writes every picture, and its text into the page."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # for the mesh: nothing is computed on it
    orders, words = order()
    made = {
        "token_tree": tree(),
        "unmask_order": orders,
        "unmask_words": words,
        "acceptance": both("acceptance", bench()),
        "speedup": both("speedup", bench()),
        "step_times": both("step_times", times()),
        "cache_layout": both("cache_layout", *cache()),
    }
    page = (FOLDER / "pictures.md").read_text()
    for name, (figure, text) in made.items():
        figure.savefig(FOLDER / "pictures" / f"{name}.png", dpi=90)
        page = filled(page, name, text)
    (FOLDER / "pictures.md").write_text(page)


def filled(page: str, name: str, text: str) -> str:
    """The page with a text in place of the block that follows a picture.

    Raises:
      ValueError: where the page has no such picture and block.
    """
    block = re.compile(rf"(\(pictures/{name}\.png\)\n\n```text\n).*?(\n```\n)", re.DOTALL)
    if len(block.findall(page)) != 1:
        raise ValueError(f"pictures.md shows pictures/{name}.png with a block of text after it, once")
    return block.sub(lambda found: found[1] + text + found[2], page)


if __name__ == "__main__":
    main()
