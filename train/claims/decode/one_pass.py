"""Claims about decoders that write all tokens of some frames in one pass.

`Fired` (Paraformer, arXiv:2206.08317): integrate-and-fire makes an embedding of
each token, the decoder reads them from both sides. `Counted` (CPPD, arXiv:
2307.12270): behind the frames stand a query for each class, of which it is
learned how often that is there (counting), and a place-holder for each token,
of which it is learned whether it exists (ordering), and then its class.

Legend: B rows, S frames, N tokens at most, D model, K classes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.models import frames as frames_lib
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_frames


class Fired(on_frames.Pair):
  """Paraformer: an embedding of each token, made of the frames that it is."""

  shown = 0.75  # of wrong tokens, in training (Paraformer, section 2.3)

  def init(self, key):
    fire = frames_lib.initial(jax.random.fold_in(key, 1), self.width)
    return super().init(key) | dict(fire=fire)

  def _written(self, params, h, E_BND):
    holes = jnp.full(E_BND.shape[:2], on_frames.HOLE, jnp.int32)
    return self.logits(params, self.read(params, h, holes, E_BND))

  def loss(self, params, frames, ids, count, key):
    """() nats a token with some of them shown, and the quantity loss."""
    h, most = self.encoded(params, frames), self.task.most
    alpha = frames_lib.weights(params['fire'], h)
    own = frames_lib.scaled(alpha, count)
    E, there = frames_lib.fired(h, own, count, most), ids != on_frames.END
    wrong = self._written(jax.lax.stop_gradient(params), h, E).argmax(-1) != ids
    target = params['decoder']['embedding'][ids]
    E = frames_lib.glanced(E, target, wrong, there, self.shown, key)
    nats = on_frames.nats(self._written(params, h, E), ids, there)
    return nats + frames_lib.quantity(alpha, count)

  def answers(self, params, frames):
    """ids (B, N), END behind the last; one pass."""
    h, most = self.encoded(params, frames), self.task.most
    alpha = frames_lib.weights(params['fire'], h)
    count = jnp.minimum(frames_lib.counted(alpha), most)
    E = frames_lib.fired(h, alpha, count, most)
    return _chosen(self._written(params, h, E), count)


class Counted(on_frames.Pair):
  """CPPD: queries of classes and place-holders of tokens behind the frames."""

  counting = 1.0  # weight of the loss of counts
  ordering = 1.0  # and of the loss of what exists

  def init(self, key):
    shape = self.width, self.task.most + 2
    heads = jax.random.normal(jax.random.fold_in(key, 1), shape)
    return super().init(key) | dict(heads=heads * self.width**-0.5)

  def _read(self, params, frames):
    """(how often each class is there (B, K, N + 1), whether each token exists
    (B, N), its class (B, N, V)): logits."""
    K, most = self.task.classes, self.task.most
    holes = [on_frames.HOLE] * most
    row = jnp.array([*range(on_frames.FIRST, on_frames.FIRST + K), *holes])
    ids = jnp.broadcast_to(row, (len(frames), len(row)))
    x = self.read(params, self.encoded(params, frames), ids)
    found = x @ params['heads']
    z = self.logits(params, x[:, K:])
    return found[:, :K, : most + 1], found[:, K:, most + 1], z

  def loss(self, params, frames, ids, count, key):
    """() nats of a count, of a token's existence and of its class."""
    del key
    often, exists, z = self._read(params, frames)
    there = ids != on_frames.END
    classes = on_frames.FIRST + jnp.arange(self.task.classes)
    counts = (ids[:, None] == classes[:, None]).sum(-1)
    everywhere = jnp.ones(counts.shape, bool)
    order = optax.sigmoid_binary_cross_entropy(exists, there.astype(z.dtype))
    return (
      on_frames.nats(z, ids, there)
      + self.counting * on_frames.nats(often, counts, everywhere)
      + self.ordering * order.mean()
    )

  def answers(self, params, frames):
    """ids (B, N), END behind the last; one pass."""
    _, exists, z = self._read(params, frames)
    return _chosen(z, (exists > 0).astype(jnp.int32).cumprod(1).sum(1))


def _chosen(z_BNV, count_B):
  z = z_BNV.at[..., : on_frames.FIRST].set(-jnp.inf)
  there = jnp.arange(z.shape[1]) < count_B[:, None]
  return jnp.where(there, z.argmax(-1), on_frames.END)


class Unshown(Fired):
  """`Fired` that is shown nothing in training."""

  shown = 0.0


class Uncounted(Counted):
  """`Counted` whose queries of classes are read, but learn no counts."""

  counting = 0.0


MODELS = {
  'fired': Fired,
  'unshown': Unshown,
  'counted': Counted,
  'uncounted': Uncounted,
}


def beside(run, *, on, model, by, at_most):
  """LEARN: edits a token of one pass, against a pass for every token.

  Args:
    on: as of on_frames.trained. model: of MODELS. by: share of tokens by which
      one pass may be worse. at_most: edits a token of a pass for every token,
      as it is no feat to be as good as what has not learned.
  """
  many, seconds = on_frames.trained(run, 'causal', on_frames.Causal, on)
  once, more = on_frames.trained(run, model, MODELS[model], on)
  gaps = np.subtract(once['error'], many['error'])
  found = {'one pass': once['error'], 'one by one': many['error']}
  seconds = max(seconds, more)
  passes = on_frames.TASKS[on['task']]().most
  findings = [
    ablation.at_most('edits more in one pass', gaps, by, seconds),
    ablation.at_most('edits one by one', many['error'], at_most, seconds),
  ]
  return ablation.outcome(
    run, found, findings, 'edits a token',
    f'{on["rows"]} new rows for a seed; 1 pass of the decoder against {passes};'
    f' {np.mean(once["length"]):.1%} of lengths are right, '
    f'{np.mean(many["length"]):.1%} one by one',
    seconds,
  )  # fmt: skip


def fewer_edits(run, *, on, models):
  """LEARN: a model of one pass has fewer edits a token than another.

  Args:
    on: as of on_frames.trained. models: two names of MODELS.
  """
  first, second = models
  each = {
    name: on_frames.trained(run, name, MODELS[name], on) for name in models
  }
  found = {name: numbers['error'] for name, (numbers, _) in each.items()}
  seconds = max(spent for _, spent in each.values())
  return ablation.outcome(
    run, found, [ablation.less(found, first, second, 0.0, seconds)],
    'edits a token', f'{on["rows"]} new rows for a seed, one pass', seconds,
  )  # fmt: skip


def as_a_loop(run, *, rows, length, within):
  """EQ: integrate-and-fire as one product, and frame by frame.

  Args:
    rows: of frames, of random weights. length: frames.
  """
  rng = np.random.default_rng(0)
  h, alpha = rng.normal(size=(rows, length, 8)), rng.random((rows, length))
  wanted = [_looped(*row) for row in zip(h, alpha, strict=True)]
  numbers, most = [len(x) for x in wanted], max(map(len, wanted))
  with jax.enable_x64(True):
    count = frames_lib.counted(alpha)
    made = np.asarray(frames_lib.fired(h, alpha, count, most))
  padded = [np.pad(x, ((0, most - len(x)), (0, 0))) for x in wanted]
  same = np.asarray(count).tolist() == numbers
  return experiment.equal(
    [experiment.gap(made, padded)], within,
    f'{rows} rows of {length} frames with random weights, {sum(numbers)} '
    f'tokens, {"as" if same else "NOT as"} many as the loop fires',
    same,
  )  # fmt: skip


def _looped(h_SD, alpha_S):
  """Tokens (n, D) of a row, frame by frame; the last may lack .45 of a token,
  as in FunASR."""
  out, total, token = [], 0.0, np.zeros(h_SD.shape[1])
  for h, left in zip(h_SD, alpha_S, strict=True):
    while total + left >= 1:
      out.append(token + (1 - total) * h)
      left, total, token = left - (1 - total), 0.0, np.zeros(len(h))
    total, token = total + left, token + left * h
  return np.array([*out, token] if total >= 1 - 0.45 else out)


def not_split():
  """Knock-out: a frame is whole in the token that it begins in."""

  def whole(alpha, tokens):
    first = jnp.cumsum(alpha, 1) - alpha
    own = jnp.floor(first)[..., None] == jnp.arange(tokens)
    return jnp.where(own, alpha[..., None], 0)

  return knockouts.patched(frames_lib, 'split', whole)


def one_rate():
  """Knock-out: every frame is as much of a token as any other."""
  even = lambda own, h: jnp.full(h.shape[:2], jax.nn.sigmoid(own['out_bias']))
  return knockouts.patched(frames_lib, 'weights', even)


def no_order():
  """Knock-out: which place-holders exist is not learned."""
  return knockouts.patched(Counted, 'ordering', 0.0)
