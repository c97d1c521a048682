"""ReMDM (arXiv:2503.00307): every pass opens known tokens again with a probability of its own, under the same marginals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Editing, counted

SCHEDULES = ("mdlm", "cap", "rescale", "conf", "loop", "forward_backward")
EPS = 1e-5  # the time at which the last step ends


@dataclasses.dataclass(frozen=True)
class ReMDM(Editing):
    """Steps of the reverse process over a block, in which known tokens are masked again with probability sigma.

    Time falls from 1 to 0 in `steps` equal steps; at time t a position is known with probability 1 - t. A step from t to
    s opens a known position with sigma, and writes an open one with ((1 - s) - (1 - sigma)(1 - t)) / t. A last pass
    writes the likeliest tokens at what is open. With a temperature of 1 this is the paper's sampler; at 0 only the
    positions are drawn.

    sigma is 0 (`mdlm`), `eta` (`cap`), `eta` times the largest possible one (`rescale`), that times the softmax of minus
    the probabilities with which tokens were written (`conf`), or (t - s) / (1 - t) (`forward_backward`). `loop` steps
    without it up to time `t_on`, where a share `alpha_on` is known, then with `eta` at this share until `t_off`, and
    then without it again.

    The original makes no pass after a step that changed nothing. Here every step is one.

    Attributes:
      schedule: one of `SCHEDULES`.
      steps: of a block, without the last pass; 0: as many as it has positions.
      eta: see above; the more steps, the smaller. The published values for 1,024 steps are 0.008 (`cap`), 0.015
        (`rescale`) and 0.02 (`loop`).
      t_on: see above.
      t_off: see above.
      alpha_on: see above.
    """

    about = About("remdm", "each pass opens known tokens again, by chance", "arXiv:2503.00307", "own text")

    schedule: str = "cap"
    steps: int = 0
    eta: float = 0.008
    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9

    def __post_init__(self):
        if self.schedule not in SCHEDULES or self.steps < 0 or not 0 <= self.eta <= 1:
            raise ValueError(
                f"remdm needs a schedule of {', '.join(SCHEDULES)}, steps >= 0 and eta in [0, 1], got {self}"
            )
        at_rest = self.eta * self.alpha_on <= 1 - self.alpha_on  # a chance of at most 1
        if not 0 < self.t_off < self.t_on < 1 or not 0 < self.alpha_on < 1 or not (at_rest or self.schedule != "loop"):
            raise ValueError(
                "remdm needs 0 < t_off < t_on < 1, alpha_on in (0, 1) and, for loop, eta <= (1 - alpha_on) / alpha_on, got "
                f"{self}"
            )

    @property
    def idle(self):
        return True

    @property
    def warped(self):
        """Probabilities after temperature and filters, from which tokens are drawn."""
        return True

    def init(self, batch, width, vocab_size):
        """The probability with which each token was written, `[B, W]`."""
        return jnp.zeros((batch, width))

    def chances(self, t: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How likely steps from times `t` to `s` write an open position, and open a known one, each shaped like `t`.

        For `conf` the second is the largest sigma, and the first is for open positions, whose sigma is 0.
        """
        most = np.where(t < 1, np.minimum(1, s / np.maximum(1 - t, 1e-30)), 1.0)
        if self.schedule == "loop":
            at_rest = (t <= self.t_on) & (t > self.t_off)
            rising = self.alpha_on / (1 - self.t_on)
            early = (t - s) * rising / (1 - (1 - t) * rising)
            write = np.where(t > self.t_on, early, (t - s) / t)  # the last phase scales both times alike
            rest = self.eta * self.alpha_on / (1 - self.alpha_on)
            return np.where(at_rest, rest, write), np.where(at_rest, self.eta, 0.0)
        sigma = {
            "mdlm": np.zeros_like(t),
            "cap": np.minimum(self.eta, most),
            "rescale": self.eta * most,
            "conf": np.zeros_like(t),
            "forward_backward": np.where(t < 1, (t - s) / np.maximum(1 - t, 1e-30), 1.0),
        }[self.schedule]
        return ((1 - s) - (1 - sigma) * (1 - t)) / t, most if self.schedule == "conf" else sigma

    def __call__(self, guess, memory):
        width = guess.masked.shape[1]
        total = self.steps or counted(guess)
        write, sigma = self._tables(width)
        row = jnp.zeros_like(guess.step) if self.steps else total
        at = jnp.minimum(guess.step, write.shape[1] - 1)
        over = guess.step >= total
        opens = jnp.broadcast_to(sigma[row, at][:, None], guess.masked.shape)
        if self.schedule == "conf":
            own = jax.nn.softmax(jnp.where(guess.committed, -memory, -jnp.inf), axis=1)
            opens = jnp.where(guess.committed, own * opens, 0.0)
        last = over[:, None]
        commit = guess.masked & ((guess.noise < write[row, at][:, None]) | last)
        again = guess.committed & (guess.noise < opens) & ~last
        tokens = jnp.where(last, jnp.argmax(guess.log_probs, axis=-1).astype(jnp.int32), guess.tokens)
        picked = jnp.exp(jnp.take_along_axis(guess.log_probs, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0])
        return Choice(commit, picked, tokens, again, stay=~over), jnp.where(commit, picked, memory)

    def _tables(self, width):
        """Both chances by the number of steps and the step, `[1, S]`, or `[W + 1, W]` for as many as positions."""
        if self.steps:
            return tuple(jnp.asarray(one[None], jnp.float32) for one in self.chances(*times(self.steps)))
        tables = [np.ones((width + 1, width)), np.zeros((width + 1, width))]
        for total in range(1, width + 1):
            for table, one in zip(tables, self.chances(*times(total)), strict=True):
                table[total, :total] = one
        return tuple(jnp.asarray(table, jnp.float32) for table in tables)


def times(total: int) -> tuple[np.ndarray, np.ndarray]:
    """The times at which each of `total` steps begins and ends, `[total]` each."""
    size = (1 - EPS) / total
    begin = 1 - np.arange(total) * size
    return begin, begin - size
