"""What a compiled program may hold."""

import jax
import jax.numpy as jnp


def check_operations(traced):
    """A decoder's program has its loop on the device, asks the host nothing and multiplies floats only: a GPU's
    libraries have no product of other matrices."""
    done = list(operations(traced.jaxpr.jaxpr))
    used = {each.primitive.name for each in done}
    assert "while" in used and not any(word in name for name in used for word in ("callback", "feed", "host"))
    kinds = {x.aval.dtype for each in done if each.primitive.name == "dot_general" for x in each.invars}
    assert kinds and all(jnp.issubdtype(kind, jnp.floating) for kind in kinds), kinds


def operations(jaxpr):
    """All operations of a program."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from operations(inner)
