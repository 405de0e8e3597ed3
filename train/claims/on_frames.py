"""Frames to tokens: tasks, an encoder and a decoder behind it, for claims.

Two tasks of which every row is drawn anew. `Symbols`: each symbol is a vector
of its own for 1 to 4 frames, noise on all, silence behind; no two neighbours
are alike, as nothing would tell them from one longer symbol. `Digits`: pictures
of strings of digits, 3 to 6 columns wide each, column by column.

A decoder.Decoder of model.visibility=full encodes the frames; the decoder reads
rows [encoded frames; tokens]. `Causal` writes from left to right, a pass for
every token: the baseline of what writes in one pass (decode/one_pass.py).

Legend: B rows, S frames, C numbers of a frame, N tokens at most, D model.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.models import batch as batch_lib
from paraxis.models import decoder
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment

FRAME, HOLE, END, FIRST = range(4)  # ids; those of a task's classes from FIRST
NEW = 10_000_000  # seeds from here are of rows that no training has seen

GLYPHS = (
  '111101101101111', '010110010010111', '111001111100111', '111001111001111',
  '101101111001001', '111100111001111', '111100111101111', '111001001001001',
  '111101111101111', '111101111001111',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Symbols:
  """least to most symbols of so many classes, as frames of `numbers`."""

  classes: int = 10
  least: int = 3
  most: int = 8
  numbers: int = 8
  noise: float = 0.5

  @property
  def frames(self):
    """S."""
    return 4 * self.most

  def drawn(self, rng):
    """(frames (s, C), classes) of a row."""
    codes = np.random.default_rng(0).normal(size=(self.classes, self.numbers))
    n = rng.integers(self.least, self.most + 1)
    steps = rng.integers(1, self.classes, n)
    ids = np.cumsum(steps) % self.classes  # no two neighbours alike
    return codes[ids].repeat(rng.integers(1, 5, n), 0), ids


@dataclasses.dataclass(frozen=True)
class Digits:
  """Pictures of least to most digits, `numbers` pixels high."""

  classes: int = 10
  least: int = 2
  most: int = 5
  numbers: int = 7
  noise: float = 0.3

  @property
  def frames(self):
    """S."""
    return 8 * self.most

  def drawn(self, rng):
    """(columns (s, C), digits) of a row."""
    ids = rng.integers(0, 10, rng.integers(self.least, self.most + 1))
    parts = []
    for digit in ids:
      glyph = np.array([*map(float, GLYPHS[digit])]).reshape(5, 3)
      low = rng.integers(0, self.numbers - 4)
      tall = np.pad(glyph, ((low, self.numbers - 5 - low), (0, 0)))
      wide = tall.repeat(rng.integers(1, 3, 3), 1)
      gap = np.zeros((self.numbers, rng.integers(1, 3)))
      parts += [wide, gap]
    return np.concatenate(parts, 1).T, ids


TASKS = {'symbols': Symbols, 'digits': Digits}


def draw(task, rows, seed):
  """(frames (B, S, C) float32, ids (B, N) int32, count (B,) int32); ids are END
  behind the tokens of a row."""
  rng = np.random.default_rng(seed)
  frames = rng.normal(0, task.noise, (rows, task.frames, task.numbers))
  ids = np.full((rows, task.most), END, np.int32)
  count = np.zeros(rows, np.int32)
  for i in range(rows):
    own, tokens = task.drawn(rng)
    frames[i, : len(own)] += own
    ids[i, : len(tokens)], count[i] = FIRST + tokens, len(tokens)
  return frames.astype(np.float32), ids, count


class Pair:
  """An encoder of frames, and a decoder of rows that begin with them."""

  visibility = 'full'

  def __init__(self, config, task):
    """config: schema.Config, of both."""
    words = FIRST + task.classes
    made = lambda features, visibility: decoder.Decoder(
      experiment.fields(
        config,
        {
          'model.features': features,
          'model.visibility': visibility,
          'model.vocab_size': words,
          'model.mask_id': -1,
        },
      ).model
    )
    self.task, self.width = task, config.model.d_model
    self.encoder = made(task.numbers, 'full')
    self.decoder = made(self.width, self.visibility)

  def init(self, key) -> dict[str, Any]:
    """{'encoder', 'decoder', ..: parameters}."""
    one, two = jax.random.split(key)
    return dict(encoder=self.encoder.init(one), decoder=self.decoder.init(two))

  def encoded(self, params, frames_BSC):
    """h (B, S, D)."""
    ids = jnp.full(frames_BSC.shape[:2], FRAME, jnp.int32)
    return features(self.encoder, params['encoder'], ids, frames_BSC)

  def read(self, params, h_BSD, ids_BN, given_BND=None):
    """x (B, N, D) of what stands behind the frames: ids, and their frames."""
    if given_BND is None:
      given_BND = jnp.zeros((*ids_BN.shape, self.width), h_BSD.dtype)
    own = jnp.full(h_BSD.shape[:2], FRAME, jnp.int32)
    ids = jnp.concatenate([own, ids_BN], 1)
    given = jnp.concatenate([h_BSD, given_BND], 1)
    x = features(self.decoder, params['decoder'], ids, given)
    return x[:, h_BSD.shape[1] :]

  def logits(self, params, x_BND):
    """z (B, N, V)."""
    return self.decoder.logits(params['decoder'], x_BND)


class Causal(Pair):
  """From left to right, each token behind all frames and those before it."""

  visibility = 'causal'

  def loss(self, params, frames, ids, count, key):
    """() nats a token, END among them."""
    del key
    h, start = self.encoded(params, frames), jnp.full_like(ids[:, :1], HOLE)
    z = self.logits(params, self.read(params, h, jnp.append(start, ids, 1)))
    wanted = jnp.append(ids, jnp.full_like(start, END), 1)
    return nats(z, wanted, jnp.arange(z.shape[1]) <= count[:, None])

  def answers(self, params, frames):
    """ids (B, N), END behind the last; N passes of the decoder."""
    h = self.encoded(params, frames)
    row = jnp.full((len(frames), self.task.most + 1), HOLE, jnp.int32)

    def write(n, row):
      z = self.logits(params, self.read(params, h, row))[:, n]
      return row.at[:, n + 1].set(z.at[:, :END].set(-jnp.inf).argmax(-1))

    row = jax.lax.fori_loop(0, self.task.most, write, row)[:, 1:]
    return jnp.where((row == END).cumsum(1) > 0, END, row)


def features(model, params, ids_BT, frames_BTC):
  """x_BTD of a decoder.Decoder that reads frames."""
  ones = jnp.ones_like(ids_BT)
  batch = batch_lib.Batch(
    ids_BT, None, ones, ones.cumsum(1) - 1, None, None, frames_BTC
  )
  return model.features(params, batch)[0]


def nats(z, ids, there):
  """() mean over places `there` of the nats of ids under logits."""
  each = optax.softmax_cross_entropy_with_integer_labels(z, ids)
  return jnp.where(there, each, 0).sum() / there.sum()


def distance(found, wanted) -> int:
  """Edits (a token in, out, or another) between two sequences."""
  row = list(range(len(wanted) + 1))
  for i, a in enumerate(found):
    before, row = row, [i + 1]
    for j, b in enumerate(wanted):
      row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (a != b)))
  return row[-1]


def error(found_BN, ids_BN) -> float:
  """Edits a token of rows, each to its first END."""
  words = lambda row: [x for x in np.asarray(row).tolist() if x != END]
  pairs = [(words(a), words(b)) for a, b in zip(found_BN, ids_BN, strict=True)]
  return sum(distance(*p) for p in pairs) / sum(len(b) for _, b in pairs)


def learned(make, config, task, rows, say):
  """{'error': edits a token on `rows` new rows, 'length': share of them whose
  number of tokens is right} of a training by adam.

  Args:
    make: (config, task) -> `Pair` with `loss` and `answers`.
  """
  model, steps = make(config, task), config.train.steps
  rate = optax.warmup_cosine_decay_schedule(
    0, config.optimizer.learning_rate, config.optimizer.warmup_steps, steps
  )
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
  params = model.init(jax.random.key(config.train.seed))
  state, key = tx.init(params), jax.random.key(config.train.seed + NEW)

  @jax.jit
  def update(params, state, noise, given):
    value, grads = jax.value_and_grad(model.loss)(params, *given, noise)
    change, state = tx.update(grads, state, params)
    return optax.apply_updates(params, change), state, value

  for t in range(steps):
    seed = [config.train.seed, t]
    given = draw(task, config.train.batch_size, seed)
    noise = jax.random.fold_in(key, t)
    params, state, value = update(params, state, noise, given)
    if (t + 1) % max(steps // 4, 1) == 0:
      say(f'step {t + 1}: loss {float(value):.3f}')
  frames, ids, count = draw(task, rows, [NEW, config.train.seed])
  found = np.asarray(jax.jit(model.answers)(params, frames))
  right = float(((found != END).sum(1) == count).mean())
  made = {'error': error(found, ids), 'length': right}
  say(f'{made["error"]:.2%} of tokens wrong, {right:.1%} of lengths right')
  return made


def trained(run, name, make, on):
  """({'error', 'length': numbers of the seeds}, CPU-seconds of a training).

  Args:
    name: of the trainings. make: as of `learned`.
    on: dict(task, fields, seeds, rows): a name of TASKS, {'section.field':
      value} of the training, its seeds, and the new rows that are answered.
  """
  task = TASKS[on['task']]()
  config = experiment.fields(run.config, on['fields'])

  def learn(config, folder, say):
    del folder
    return learned(make, config, task, on['rows'], say)

  about = dataclasses.asdict(task) | dict(rows=on['rows'])
  code = make, type(task)
  configs, seeds = {name: config}, on['seeds']
  rows = ablation.trained(run, configs, seeds, learn, about, code)
  of = lambda number: ablation.numbers(rows, number)[name]
  return {n: of(n) for n in ('error', 'length')}, ablation.cpu_seconds(rows)
