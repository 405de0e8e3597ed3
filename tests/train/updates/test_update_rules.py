"""Every update rule against a plain numpy loop, and on a mesh against none."""

import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import optimizer as fields
from paraxis.train import program as program_lib
from paraxis.train.updates import adafactor
from paraxis.train.updates import matrices
from paraxis.train.updates import optimizers
from paraxis.train.updates import soap
from paraxis.train.updates import update_rules
from tests import support

# path: (shape, axes, kind, number of input axes after those of the batch)
LEAVES = {
  'embedding': ((8, 6), ('vocab', 'embed'), 'embedding', 1),
  'norm/scale': ((6,), ('norm',), 'vector', 0),
  'layers/mlp/up': ((2, 6, 5), ('layers', 'embed', 'mlp'), 'matrix', 1),
  'layers/attention/query': (
    (2, 6, 2, 3), ('layers', 'embed', 'heads', 'head_dim'), 'matrix', 1,
  ),
  'layers/attention/output': (
    (2, 2, 3, 6), ('layers', 'heads', 'head_dim', 'embed'), 'matrix', 2,
  ),
  'layers/moe/down': (
    (2, 3, 5, 6), ('layers', 'experts', 'mlp', 'embed'), 'matrix', 1,
  ),
}  # fmt: skip
MODEL = types.SimpleNamespace(
  axes={p: leaf[1] for p, leaf in LEAVES.items()},
  kinds={p: leaf[2] for p, leaf in LEAVES.items()},
  frozen=frozenset(), held={},
  inputs={p: leaf[3] for p, leaf in LEAVES.items()},
)  # fmt: skip
STEPS = 5
TOKENS = 7  # of a step
BASE = dict(
  learning_rate=0.02, matrix_learning_rate=0.03, warmup_steps=2, b1=0.8,
  b2=0.9, weight_decay=0.2, schedule='constant', precondition_every=2,
  slow_decay=0.98, slow_weight=3.0, curvature=0.4, correction=0.3,
  precondition_decay=0.7, epsilon=0.3, matrix_momentum=0.7,
)  # fmt: skip


def _arrays(seed):
  """Parameters of seed 0, with a matrix of zeros; else gradients, two short."""
  rng = np.random.default_rng(seed)
  size = 0.01 if seed in (1, 4) else 1.0
  out = {p: size * rng.normal(size=leaf[0]) for p, leaf in LEAVES.items()}
  out['layers/mlp/up'][1] *= seed > 0
  return out


def _settings(name, **changes):
  return schema.Optimizer(name=name, **(BASE | changes))


def _run(c, steps=STEPS):
  """(parameters, optimizer state) after some steps, in float64."""
  with jax.enable_x64(True):
    optimizer = optimizers.Optimizer(c, steps, MODEL, TOKENS)
    params = jax.tree.map(jnp.asarray, _arrays(0))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(steps):
      grads = jax.tree.map(jnp.asarray, _arrays(1 + step))
      params, state = update(grads, state, params, jnp.int32(step))
    return jax.tree.map(np.asarray, (params, state))


def _share(step):
  return min(1.0, (step + 1) / BASE['warmup_steps'])


def _matrices(path, x):
  """x as (matrices, rows, columns), a view."""
  shape, axes, _, inputs = LEAVES[path]
  batch = sum(a in ('layers', 'experts') for a in axes)
  rows = int(np.prod(shape[batch : batch + inputs]))
  return x.reshape(int(np.prod(shape[:batch])), rows, -1)


def _nadamw(c, path, p, grads):
  m, v = np.zeros_like(p), np.zeros_like(p)
  for t, g in enumerate(grads, 1):
    m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g * g
    ahead = c.b1 * m / (1 - c.b1 ** (t + 1)) + (1 - c.b1) * g / (1 - c.b1**t)
    yield ahead / (np.sqrt(v / (1 - c.b2**t)) + c.epsilon)


def _lion(c, path, p, grads):
  m = np.zeros_like(p)
  for g in grads:
    yield np.sign(c.b1 * m + (1 - c.b1) * g)
    m = c.b2 * m + (1 - c.b2) * g


def _ademamix(c, path, p, grads):
  fast, slow, v = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
  life = lambda b: np.log(0.5) / np.log(b) - 1  # steps that halve a gradient
  for t, g in enumerate(grads, 1):
    done = (t - 1) / STEPS
    mean = (1 - done) * life(c.b1) + done * life(c.slow_decay)
    b3 = 0.5 ** (1 / (mean + 1))
    fast = c.b1 * fast + (1 - c.b1) * g
    slow = b3 * slow + (1 - b3) * g
    v = c.b2 * v + (1 - c.b2) * g * g
    both = fast / (1 - c.b1**t) + c.slow_weight * done * slow
    yield both / (np.sqrt(v / (1 - c.b2**t)) + c.epsilon)


def _sophia(c, path, p, grads):
  m, h = np.zeros_like(p), np.zeros_like(p)
  for t, g in enumerate(grads):
    m = c.b1 * m + (1 - c.b1) * g
    mean = m / (1 - c.b1 ** (t + 1))
    yield np.clip(mean / np.maximum(c.curvature * h, c.epsilon), -1, 1)
    if t % c.precondition_every == 0:
      h = c.b2 * h + (1 - c.b2) * TOKENS * g * g


def _mars(c, path, p, grads):
  m, v, old = np.zeros_like(p), np.zeros_like(p), None
  for t, g in enumerate(grads, 1):
    change = 0 if old is None else g - old
    x = g + c.correction * c.b1 / (1 - c.b1) * change
    for one in _matrices(path, x):
      one /= max(1.0, np.linalg.norm(one))
    m, v, old = c.b1 * m + (1 - c.b1) * x, c.b2 * v + (1 - c.b2) * x * x, g
    yield m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.epsilon)


def _adafactor(c, path, p, grads):
  """Factored over rows and columns of each matrix; vectors are not."""
  v, row, col = np.zeros_like(p), None, None
  for t, g in enumerate(grads, 1):
    beta, s = 1 - t**-0.8, g * g + 1e-30
    if p.ndim == 1:
      v = beta * v + (1 - beta) * s
      u = g / np.sqrt(v)
    else:
      s = _matrices(path, s)
      r, q = s.mean(2, keepdims=True), s.mean(1, keepdims=True)
      row = (1 - beta) * r + (0 if row is None else beta * row)
      col = (1 - beta) * q + (0 if col is None else beta * col)
      v = row * col / row.mean(1, keepdims=True)
      u = g / np.sqrt(v.reshape(g.shape))
    u = u.copy()
    scaled = zip(_sized(path, u), _sized(path, p), strict=True)
    for one, own in scaled:
      one *= max(np.sqrt((own**2).mean()), 1e-3) / max(
        1, np.sqrt((one**2).mean())
      )
    yield u


def _sized(path, x):
  return _matrices(path, x) if LEAVES[path][2] == 'matrix' else [x]


def _scion(c, path, p, grads):
  m, b = np.zeros_like(p), c.matrix_momentum
  for g in grads:
    m = b * m + (1 - b) * g
    d = m.copy()
    for x in _matrices(path, d):
      u, s, vt = np.linalg.svd(x, full_matrices=False)
      s = s / np.linalg.norm(s)
      for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
      x[:] = (x.shape[1] / x.shape[0]) ** 0.5 * (u * s) @ vt
    yield d


def _signs(c, path, p, grads):
  m, b = np.zeros_like(p), c.matrix_momentum
  for g in grads:
    m = b * m + (1 - b) * g
    yield np.sign(m)


def _set_apart(s):
  K = len(s)
  return s + np.diag(2e-3 * np.trace(s) / K * np.linspace(1, 2, K))


def _eigenvectors(s):
  """Largest first, of statistics whose eigenvalues are set apart."""
  return np.linalg.eigh(_set_apart(s))[1][:, ::-1]


def _soap(c, path, p, grads):
  """One matrix after another; a column's sign changes nothing."""
  batch = [_one_soap(c, [_matrices(path, g)[i] for g in grads])
           for i in range(len(_matrices(path, p)))]  # fmt: skip
  for each in zip(*batch, strict=True):
    yield np.stack(each).reshape(p.shape)


def _one_soap(c, grads):
  m = v = np.zeros_like(grads[0])
  sums, bases = None, None
  beta = c.precondition_decay
  for t, g in enumerate(grads):
    grams = g @ g.T, g.T @ g
    if t == 0:
      sums = [(1 - beta) * x for x in grams]
      bases = [_eigenvectors(s) for s in sums]
      yield np.zeros_like(g)
      continue
    left, right = bases
    turned = left.T @ g @ right
    m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * turned**2
    mean = left.T @ m @ right / (1 - c.b1**t)
    d = mean / (np.sqrt(v / (1 - c.b2**t)) + c.epsilon)
    yield left @ d @ right.T
    sums = [beta * s + (1 - beta) * x for s, x in zip(sums, grams, strict=True)]
    if t % c.precondition_every == 0:
      for axis, (s, q) in enumerate(zip(sums, bases, strict=True)):
        s = _set_apart(s)
        order = np.argsort(-np.diag(q.T @ s @ q))
        v = np.take(v, order, axis)
        bases[axis] = np.linalg.qr(s @ q[:, order])[0]


# Rule -> direction a step; what it leaves to another, and the rate's field.
LOOPS = {
  'nadamw': _nadamw, 'lion': _lion, 'ademamix': _ademamix, 'sophia': _sophia,
  'adafactor': _adafactor, 'mars': _mars, 'scion': _scion, 'soap': _soap,
  'signs': _signs,
}  # fmt: skip


def _loop(name, c, path):
  """Parameters after every step of a rule, decay decoupled."""
  p = _arrays(0)[path]
  grads = [_arrays(1 + t)[path] for t in range(STEPS)]
  matrix = name in ('scion', 'soap')
  peak = c.matrix_learning_rate if matrix else c.learning_rate
  decay = c.weight_decay * (LEAVES[path][2] != 'vector')
  # A generator reads p as it is at its step.
  for t, d in enumerate(LOOPS[name](c, path, p, grads)):
    p -= peak * _share(t) * (d + decay * p)
  return p


@pytest.fixture(scope='module')
def found():
  kept = {}

  def of(name):
    if name not in kept:
      kept[name] = _run(_settings(name))
    return kept[name]

  return of


@pytest.fixture(autouse=True)
def factored(monkeypatch):
  """Dimensions this small are factored, and Kron's first steps are few."""
  monkeypatch.setattr(adafactor, 'FACTORED', 2)
  monkeypatch.setattr(update_rules.kron, 'FLAT', 2)


CASES = [
  (name, path)
  for name in LOOPS
  for path in LEAVES
  if name != 'signs' and LEAVES[path][2] in update_rules.RULES[name].kinds
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize('name, path', CASES)
def test_a_rule_equals_a_numpy_loop(found, name, path):
  p = _loop(name, _settings(name), path)
  np.testing.assert_allclose(found(name)[0][path], p, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('path', ['embedding', 'norm/scale'])
def test_scion_moves_the_rest_by_signs(found, path):
  p = _loop('signs', _settings('scion'), path)
  np.testing.assert_allclose(found('scion')[0][path], p, rtol=1e-6)


@pytest.mark.parametrize(
  'name, changes',
  [
    ('ademamix', dict(slow_decay=0.9)), ('ademamix', dict(slow_weight=2.0)),
    ('sophia', dict(curvature=0.2)), ('sophia', dict(precondition_every=3)),
    ('mars', dict(correction=0.1)), ('scion', dict(matrix_momentum=0.8)),
    ('soap', dict(precondition_every=3)), ('soap', dict(b2=0.8)),
    ('soap', dict(precondition_decay=0.9)),
  ],
)  # fmt: skip
def test_every_setting_counts(found, name, changes):
  path = 'layers/mlp/up'
  p = _loop(name, _settings(name, **changes), path)
  assert np.abs(found(name)[0][path] - p).max() > 1e-5


def _prodigy(c, paths):
  """arXiv:2306.06101, algorithm 4, over all parameters; decoupled decay."""
  start = {p: _arrays(0)[p] for p in paths}
  x = {p: a.copy() for p, a in start.items()}
  zeros = lambda: {p: np.zeros_like(a) for p, a in start.items()}
  m, v, s = zeros(), zeros(), zeros()
  d, r, b3, first = 1e-6, 0.0, c.b2**0.5, 1e-6
  for t in range(STEPS):
    g = {p: _arrays(1 + t)[p] for p in paths}
    bias = (1 - c.b2 ** (t + 1)) ** 0.5 / (1 - c.b1 ** (t + 1))
    rate = d * c.learning_rate * _share(t) * bias
    r = b3 * r + d / first * rate * sum(
      np.vdot(g[p], start[p] - x[p]) for p in paths
    )
    for p in paths:
      m[p] = c.b1 * m[p] + (1 - c.b1) * d * g[p]
      v[p] = c.b2 * v[p] + (1 - c.b2) * (d * g[p]) ** 2
      s[p] = b3 * s[p] + rate * d * g[p] / first
    new = max(d, r / sum(np.abs(a).sum() for a in s.values()))
    for p in paths:
      decay = c.weight_decay * (LEAVES[p][2] != 'vector')
      x[p] -= rate * (m[p] / (np.sqrt(v[p]) + new * c.epsilon) + decay * x[p])
    d = new
  return x


def test_prodigy_equals_a_numpy_loop(found):
  c = _settings('prodigy', learning_rate=1.0)
  params, _ = _run(c)
  wanted = _prodigy(c, list(LEAVES))
  for path, x in wanted.items():
    np.testing.assert_allclose(params[path], x, rtol=1e-6)
    assert np.abs(x - _arrays(0)[path]).max() > 1e-7


def _schedule_free(c, path):
  """arXiv:2405.15682, algorithm 1 with Adam; -> (average, point)."""
  x = _arrays(0)[path]
  z, v, total, decay = x.copy(), np.zeros_like(x), 0.0, c.weight_decay
  decay *= LEAVES[path][2] != 'vector'
  y = x
  for t in range(STEPS):
    g = _arrays(1 + t)[path]
    v = c.b2 * v + (1 - c.b2) * g * g
    rate = c.learning_rate * _share(t)
    d = g / (np.sqrt(v / (1 - c.b2 ** (t + 1))) + c.epsilon) + decay * y
    z = z - rate * d
    total += rate**2
    x = x + rate**2 / total * (z - x)
    y = (1 - c.b1) * z + c.b1 * x
  return x, y


@pytest.mark.parametrize('path', LEAVES)
def test_schedule_free_equals_a_numpy_loop(found, path):
  params, state = found('schedule_free')
  mean, point = _schedule_free(_settings('schedule_free'), path)
  np.testing.assert_allclose(params[path], mean, rtol=1e-6, atol=1e-7)
  held = state['schedule_free'].point[path]
  np.testing.assert_allclose(held, point, rtol=1e-6, atol=1e-7)
  assert np.abs(point - mean).max() > 1e-4


def test_soap_in_the_standard_basis_is_adamw(monkeypatch):
  """Its reduction identity: Q = 1; the first gradient is none of Adam's."""
  none = dict(left={}, right={})
  monkeypatch.setattr(soap, 'sides', lambda dims, params: none)
  c, path = _settings('soap'), 'layers/mlp/up'
  params, _ = _run(c)
  p, m, v = _arrays(0)[path], 0.0, 0.0
  for t in range(STEPS):
    rate, d = c.matrix_learning_rate * _share(t), 0.0
    if t:
      g = _arrays(1 + t)[path]
      m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g * g
      d = m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.epsilon)
    p = p - rate * (d + c.weight_decay * p)
  np.testing.assert_allclose(params[path], p, rtol=1e-6, atol=1e-7)


def test_where_bases_begin_on_a_tpu():
  """The power method from 1, by the Cholesky factor of a Gram matrix; of
  distinct eigenvalues it comes to eigenvectors."""
  s = np.random.default_rng(0).normal(size=(2, 5, 7))
  s = np.stack([_set_apart(x @ x.T) for x in s])
  wanted = np.broadcast_to(np.eye(5), s.shape)
  for _ in range(soap.START):
    y = s @ wanted
    root = np.linalg.cholesky(np.swapaxes(y, 1, 2) @ y)
    wanted = y @ np.swapaxes(np.linalg.inv(root), 1, 2)
  with jax.enable_x64(True):
    found = np.asarray(soap._began(jnp.asarray(s)))
  same = np.abs(np.einsum('bij,bij->bj', found, wanted))
  np.testing.assert_allclose(same, 1, rtol=1e-9)
  off = np.swapaxes(found, 1, 2) @ s @ found
  off = off - np.einsum('bii->bi', off)[:, None] * np.eye(5)
  assert np.abs(off).max() < 0.05 * np.abs(s).max()


def test_soap_turns_with_its_matrix():
  """Of rotated gradients SOAP gives the rotated direction, Adam does not."""
  dims = {'w': matrices.Dims(0, 1)}
  rng = np.random.default_rng(0)
  turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
  with jax.enable_x64(True):
    rule = soap.scale_by_soap(
      dims, lambda p, side, x: x, 0.9, 0.9, 1e-8, 0.9, 2
    )
    adam = update_rules.optax.scale_by_adam()
    for r, equal in ((rule, True), (adam, False)):
      w = {'w': jnp.zeros((5, 4))}
      one, other = r.init(w), r.init(w)
      for t in range(3):
        g = np.random.default_rng(t).normal(size=(5, 4))
        a, one = r.update({'w': jnp.asarray(g)}, one, w)
        b, other = r.update({'w': jnp.asarray(turn @ g)}, other, w)
      gap = np.abs(turn @ np.asarray(a['w']) - np.asarray(b['w'])).max()
      assert (gap < 1e-2) == equal  # SPREAD knows no rotation


def test_kron_whitens_what_it_is_given():
  """Gradients of one covariance: factors make them white; before, they are
  not. The direction is then as long in every direction."""
  rng = np.random.default_rng(0)
  left = np.diag([4.0, 1.0, 0.25]) @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
  dims = {'w': matrices.Dims(0, 1)}
  rule = update_rules.kron.scale_by_kron(dims, lambda p, side, x: x, 0.0, 1)
  state = rule.init({'w': jnp.zeros((3, 2))})
  update = jax.jit(rule.update)
  draw = lambda: {'w': jnp.asarray(left @ rng.normal(size=(3, 2)), jnp.float32)}
  spread = []
  for _ in range(400):
    _, state = update(draw(), state)
  q, r = np.asarray(state.left['w']), np.asarray(state.right['w'])
  for a, b in ((np.eye(3), np.eye(2)), (q.T @ q, r.T @ r)):
    white = np.stack([a @ np.asarray(draw()['w']) @ b for _ in range(2000)])
    values = np.linalg.eigvalsh(np.einsum('sij,skj->ik', white, white) / 4000)
    spread.append(values[-1] / values[0])
  assert spread[0] > 100 and spread[1] < 4
  assert not np.tril(q, -1).any() and not np.tril(r, -1).any()


@pytest.mark.parametrize('first', [0.0, 1.0])
def test_kron_of_a_matrix_long_without_gradients(first):
  """No token comes to an expert, then one does."""
  params = {'wide': jnp.zeros((64, 4)), 'narrow': jnp.zeros((3, 1))}
  dims = dict.fromkeys(params, matrices.Dims(0, 1))
  rule = update_rules.kron.scale_by_kron(dims, lambda p, side, x: x, 0.9, 10)
  update, state = jax.jit(rule.update), rule.init(params)
  rng = np.random.default_rng(0)

  def grads(norm):
    g = {p: rng.normal(size=x.shape) for p, x in params.items()}
    return {p: jnp.asarray(norm * x / np.linalg.norm(x)) for p, x in g.items()}

  for norm in (first, *[0.0] * 799):
    _, state = update(grads(norm), state)
  assert first or all((np.diag(x) == 1).all() for x in state.left.values())
  for _ in range(11):  # one of them fits the factors
    directions, state = update(grads(0.5), state)
    for d in directions.values():
      assert 1e-3 < np.sqrt(np.mean(np.square(d))) < 1.11
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


CONFIG = schema.Config(
  mesh=schema.Mesh(zero=1),
  model=schema.Model(
    vocab_size=16, d_model=8, num_heads=4, head_dim=2, d_ff=16, num_layers=3,
    num_kv_heads=4, mlp='swiglu', dtype='float64', param_dtype='float64',
  ),
  data=schema.Data(sequence_length=8),
)  # fmt: skip


def _on(config, devices, mesh):
  """{canonical path: array} of parameters and state after 3 updates."""
  program = program_lib.on_devices(config, mesh, devices=devices)
  rng = np.random.default_rng(0)
  draw = lambda: {
    p: rng.normal(size=x.shape) for p, x in program.built.params.items()
  }
  with program.context():
    params = program.on_mesh(draw(), program.built.params)
    state = jax.jit(program.optimizer.init)(params)
    update = jax.jit(program.optimizer.update)
    for t in range(4):
      grads = program.on_mesh(draw(), program.built.params)
      params, state = update(grads, state, params, jnp.int32(t))
    return {
      jax.tree_util.keystr(k): np.asarray(x)
      for k, x in jax.tree_util.tree_leaves_with_path((params, state))
    }


@pytest.mark.parametrize('name', [n for n in fields.NAMES if n != 'adamw'])
@pytest.mark.usefixtures('float64')
def test_a_mesh_changes_nothing(name):
  settings = _settings(name)
  config = schema.with_value(CONFIG, 'optimizer', settings)
  mesh = 'data=2,fsdp=2,tensor=2'
  if name == 'schedule_free':
    config = schema.with_value(config, 'mesh.zero', 0)
  one = _on(config, jax.devices()[:1], 'data=1')
  all_ = _on(config, jax.devices(), mesh)
  assert one.keys() == all_.keys()
  for path, x in one.items():
    top = max(np.abs(x).max(initial=0), 1e-30)
    assert np.abs(all_[path] - x).max(initial=0) < 1e-9 * top, path


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'optimizer.schedule': 'cosine'}, ('schedule=cosine', 'constant')),
    ({'optimizer.b1': 0.0}, ('b1=0.0', '0.9')),
    ({'mesh.zero': 1}, ('mesh.zero=1', 'data=8', 'mesh.zero=0')),
  ],
)
@pytest.mark.usefixtures('float64')
def test_schedule_free_says_what_it_needs(changes, words):
  settings = _settings('schedule_free')
  config = schema.with_value(CONFIG, 'optimizer', settings)
  config = schema.with_values(config, {'mesh.zero': 0} | changes)
  with support.refused(*words):
    program_lib.on_devices(config, 'data=8', abstract=True)


@pytest.mark.usefixtures('float64')
def test_sophia_wants_steps_of_as_many_tokens():
  config = schema.with_value(CONFIG, 'optimizer', _settings('sophia'))
  ramp = schema.with_value(config, 'train.batch_ramp', '8:8:2')
  with support.refused("batch_ramp='8:8:2'", 'optimizer.name=sophia'):
    program_lib.on_devices(ramp, 'data=8', abstract=True)
  program_lib.on_devices(config, 'data=8', abstract=True)


def test_old_names_of_fields_are_read():
  old = {'optimizer': {'muon_learning_rate': 0.5, 'muon_momentum': 0.25}}
  c = schema.view(old).optimizer
  assert (c.matrix_learning_rate, c.matrix_momentum) == (0.5, 0.25)
  both = dict(muon_learning_rate=0.5, matrix_learning_rate=0.2)
  with support.refused('optimizer.matrix_learning_rate', 'given twice'):
    schema.view({'optimizer': both})


def test_a_side_without_statistics(monkeypatch):
  """An adapter's long side, and any that is longer than the limit."""
  dims = {p: matrices.Dims(1, 1) for p in 'ab'}
  params = {'a': jnp.zeros((2, 64, 3)), 'b': jnp.zeros((2, 12, 48))}
  found = soap.sides(dims, params)
  assert found == dict(left={'b': 12}, right={'a': 3, 'b': 48})
  monkeypatch.setattr(soap, 'LARGEST', 47)
  assert soap.sides(dims, params)['right'] == {'a': 3}


def _one_kron(c, grads, number):
  """arXiv:2402.11858, by inverses, damped; fitted at due steps alone."""
  m, n = grads[0].shape
  mean, q, r = 0.0, np.eye(m), np.eye(n)
  bound = lambda x: np.linalg.norm(
    x @ (column := x[:, np.argmax((x**2).sum(0))]) / np.linalg.norm(column)
  )
  for t, g in enumerate(grads):
    mean = c.b1 * mean + (1 - c.b1) * g
    u = mean / (1 - c.b1 ** (t + 1))
    if t < 2 or t % c.precondition_every == 0:
      key = jax.random.fold_in(jax.random.key(number), t)
      v = np.asarray(jax.random.normal(key, (m, n), float))
      a = q @ (u + np.finfo(float).eps ** 0.5 * np.abs(u).mean() * v) @ r.T
      b = np.linalg.inv(q).T @ v @ np.linalg.inv(r)
      x, y = a @ a.T, b @ b.T
      z, w = a.T @ a, b.T @ b
      q = q - 0.1 / bound(x + y) * np.triu(x - y) @ q
      r = r - 0.1 / bound(z + w) * np.triu(z - w) @ r
      share = np.sqrt(np.abs(r).max() / np.abs(q).max())
      q, r = q * share, r / share
    d = q.T @ q @ u @ r.T @ r
    yield d / max(1.0, np.sqrt((d**2).mean()) / 1.1)


@pytest.mark.parametrize('path', ['layers/mlp/up', 'layers/moe/down'])
@pytest.mark.usefixtures('float64')
def test_kron_equals_a_numpy_loop(found, path):
  c, p = _settings('kron'), _arrays(0)[path]
  grads = [_matrices(path, _arrays(1 + t)[path]) for t in range(STEPS)]
  for i, one in enumerate(_matrices(path, p)):
    number = (zlib.crc32(path.encode()) + i) % 2**32
    for t, d in enumerate(_one_kron(c, [g[i] for g in grads], number)):
      one -= c.matrix_learning_rate * _share(t) * (d + c.weight_decay * one)
  np.testing.assert_allclose(found('kron')[0][path], p, rtol=1e-6, atol=1e-7)
