"""What the tests of a decoder's modules share.

Modules as functions of random parameters, packed rows, gradients alone and on a
mesh, decoding alone and on a mesh, training layouts against one device.

Legend: B rows, T tokens, D model, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import support

from paraxis.configs import schema
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.decode import step
from paraxis.models import batch
from paraxis.models import build
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.mixers import attention
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import rope
from paraxis.sharding import annotate


def module(kind, config, letter, spread):
  """(run(values, x, see, state=None) -> (y, state, aux), {name: values}).

  Args:
    kind: class of a mixer. config: schema.Model. letter: of the mixer.
    spread: standard deviation of all values, norms and biases too.
  """
  skeleton = skeleton_lib.Skeleton(lambda rngs: kind(config, rngs, letter))

  def run(values, x, see, state=None):
    """state: None, a state, or 'empty': the mixer's own."""
    own = skeleton.module(values)
    if state == 'empty':
      state = own.init_state(len(x), 0, x.dtype)
    rotations = rope.rotations(config, letter, see.positions, x.dtype)
    return own(x, see._replace(rotations=rotations), state)

  return run, randomised(skeleton, spread)


def randomised(skeleton, spread):
  """{path: normal values} of a skeleton.Skeleton."""
  rng = np.random.default_rng(0)
  return {
    path: rng.normal(0, spread, leaf.variable.shape)
    for path, leaf in skeleton.leaves.items()
  }


def parameters(model, spread):
  """{path: normal values} of a decoder.Decoder; scales and biases too, or they
  hide mistakes."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return {
    p: rng.normal(0, spread, s.shape).astype(s.dtype)
    for p, s in sorted(shapes.items())
  }


def placed(built, values):
  """{path: array} on the mesh of a build.Built."""
  return {
    p: jax.device_put(x, built.params[p].sharding) for p, x in values.items()
  }


def see_of(lengths, length):
  """Visibility of rows of documents of those lengths, padding behind."""
  segments = np.zeros((len(lengths), length), np.int32)
  positions = np.zeros_like(segments)
  for b, row in enumerate(lengths):
    t = 0
    for i, n in enumerate(row):
      segments[b, t : t + n], positions[b, t : t + n] = i + 1, np.arange(n)
      t += n
  return attention.Visibility(segments, positions)


def convolved(taps, x, positions):
  """silu of the convolution of one row (T, ...), token by token."""
  rows = [
    sum(w * x[t - j] for j, w in enumerate(taps) if j <= positions[t])
    for t in range(len(x))
  ]
  return jax.nn.silu(jnp.stack(rows))


def routed(choice, experts):
  """Ids of a token's experts, by sorting.

  Args:
    choice: (E,) scores and biases. experts: schema.Experts.
  """
  size = len(choice) // experts.groups
  value = np.sort(choice.reshape(-1, size), 1)[:, -experts.group_best :].sum(1)
  held = np.argsort(-value)[: experts.top_groups]
  inside = [i for i in range(len(choice)) if i // size in held]
  return sorted(inside, key=lambda i: -choice[i])[: experts.top_k]


def close(a, b, bound):
  """Is the largest difference within `bound` of the largest value?"""
  a, b = np.asarray(a), np.asarray(b)
  assert a.shape == b.shape and a.dtype == b.dtype == np.float64
  assert np.abs(b).max() > 0
  return np.abs(a - b).max() <= bound * np.abs(b).max()


# ----------------------------------------------------------------- gradients


def differentiate(run, values, x, c, *rest):
  """(y, dx, {name: dw}) of run(values, x, *rest); c: cotangent of y."""
  y, vjp = jax.vjp(lambda values, x: run(values, x, *rest), values, x)
  dw, dx = vjp(c)
  return y, dx, dw


def gradients(run, values, x, valid=True):
  """`differentiate`, of a random cotangent that is 0 at padding.

  valid: (B, T) bool; outputs elsewhere are 0. True: everywhere.
  """
  valid = np.asarray(valid)[..., None]
  c = np.random.default_rng(2).normal(size=x.shape) * valid
  found = jax.jit(functools.partial(differentiate, run))(values, x, c)
  return np.where(valid, found[0], 0), *found[1:]


def assert_same(found, wanted, bound=1e-12, of_values=1e-11):
  """Two results of `gradients`; bounds as of `close`."""
  (y, dx, dw), (want, want_dx, want_dw) = found, wanted
  assert close(y, want, bound) and close(dx, want_dx, bound)
  assert set(dw) == set(want_dw)
  assert not [p for p in dw if not close(dw[p], want_dw[p], of_values)]


def assert_equal(run, loop, values, x, valid=True, **bounds):
  """`gradients` of two functions of (values, x) are the same."""
  found, wanted = (gradients(f, values, x, valid) for f in (run, loop))
  assert_same(found, wanted, **bounds)


def on_mesh(
  run, axes, args, mesh, rules, manual, rows=mixer.ROWS, by=differentiate
):
  """`differentiate` on a mesh: NumPy (y, dx, {name: dw}).

  Args:
    run: of (values, x, *rest). axes: {name: logical axes of a value}.
    by: differentiates run; what else it gives beside dw has axes, too.
    args: (values, x, c, *rest); x and c are laid out as residuals, the rest as
      `rows`.
    mesh: jax Mesh. rules: rules.Rules.
    manual: differentiate in one manual region, and sum there what every device
      has of a gradient.
  """
  plain = functools.partial(by, run)

  def summed(*args):
    y, dx, dw = plain(*args)
    held = lambda k: {a for n in axes[k] for a in annotate.carriers(n)}
    left = lambda k: tuple(a for a in annotate.sizes() if a not in held(k))
    add = lambda k, d: jax.lax.psum(d, left(k)) if left(k) else d
    return y, dx, {k: add(k, d) for k, d in dw.items()}

  with annotate.use(rules), jax.set_mesh(mesh):
    weights = {k: annotate.spec(a) for k, a in axes.items()}
    residual, row = annotate.spec(mixer.RESIDUAL), annotate.spec(rows)
    own = {k: weights[k] for k in args[0]}
    specs = own, residual, residual, *[row] * len(args[3:])
    put = lambda x, s: jax.device_put(x, jax.NamedSharding(mesh, s))
    args = jax.tree.map(put, args, specs)
    region = jax.shard_map(
      summed,
      in_specs=specs,
      out_specs=(residual, residual, weights),
      check_vma=False,
    )
    found = jax.jit(region if manual else plain)(*args)
    return jax.tree.map(np.asarray, found)


# ------------------------------------------------------------------ decoding


def logits(model, params, tokens):
  """z_BTV of a document a row, of a decoder.Decoder without a cache."""
  length = tokens.shape[1]
  see = see_of([(length,)] * len(tokens), length)
  data = batch.Batch(tokens, None, *see[:2], None, None)
  run = lambda params: model.logits(params, model.features(params, data)[0])
  return np.asarray(jax.jit(run)(params))


def decoded(model, params, tokens_BT, lengths, steps, put=lambda x: x):
  """Logits of a prefill of rows of these lengths, and of more steps.

  Args:
    params: as `model.unstack` gives them. put: lays an array out by rows.

  Returns:
    ([z_BTV, then z_BV of every step], the cache of T slots).
  """
  lengths, rows = np.asarray(lengths), np.arange(len(tokens_BT))

  @jax.jit
  def start(params, tokens, lengths):
    x, cache = step.prefill(model, params, tokens, lengths, tokens_BT.shape[1])
    return model.logits(params, x), cache

  prompts = put(tokens_BT[:, : lengths.max()])
  z, cache = start(params, prompts, put(lengths))
  out, advance = [z], jax.jit(functools.partial(step.advance, model))
  for i in range(steps):
    new = map(put, (tokens_BT[rows, lengths + i], lengths >= 0))
    z, cache = advance(params, cache, *new)
    out.append(z)
  return [np.asarray(z) for z in out], cache


def decoded_on_mesh(mesh, config, params, *given):
  """`decoded` of a schema.Model, its stacked params laid out on a mesh."""
  built = build.build(
    schema.Config(mesh=schema.Mesh(sequence=False, **mesh), model=config)
  )
  with build.use(built):
    params = jax.jit(built.model.unstack)(placed(built, params))
    put = lambda x: jax.device_put(
      x, jax.NamedSharding(built.mesh, annotate.spec(('batch',)))
    )
    return decoded(built.model, params, *given, put)


class Numbers:
  """A tokenizer: a token is a letter."""

  name = fingerprint = 'numbers'

  def __init__(self, vocab_size, end_id=-1):
    self.vocab_size, self.end_id = vocab_size, end_id

  def decode_bytes(self, tokens):
    return bytes(97 + t for t in tokens)


@functools.lru_cache(maxsize=16)  # each holds its programs
def generator(
  pattern, vocab=12, mesh='', devices=1, end_id=-1, spread=0.4,
  dtype='float64', **more,
):  # fmt: skip
  """loop.Generator of a small model with random parameters; more: fields."""
  model = dict(
    vocab_size=vocab, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16,
    window=6, pattern=pattern, num_layers=max(2, len(pattern)),
    attention_block=8, dtype=dtype, param_dtype=dtype,
    tied_embedding=False,
    mamba=dict(head_dim=4, state=4), tcn=dict(kernel=3, depth=2, chunk=5),
    latent=dict(rank=6, nope_dim=4, rope_dim=4, value_dim=6),
    gated_linear=dict(gate_rank=3), recurrent=dict(tolerance=1e-13), **more,
  )  # fmt: skip
  config = schema.view(dict(model=model, mesh=dict(sequence=False)))
  built = load.built_for(config, mesh, jax.devices()[:devices])
  values = parameters(built.model, spread)
  params = placed(built, values)
  decode = dataclasses.replace(schema.Decode(), max_new_tokens=24)
  return loop.Generator(
    built, params, Numbers(vocab, end_id), decode, lambda line: None
  )


# ------------------------------------------------------------------ training


def certified(model, **mesh):
  """Rows of verify, loss and gradients: eight devices against one device."""
  config = schema.Config(
    mesh=schema.Mesh(**mesh),
    model=model,
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(warmup_steps=0),
    train=schema.Train(batch_size=8),
  )
  return support.certify(config, properties=('loss', 'gradients'))
