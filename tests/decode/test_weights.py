"""decode.weights=int4: the model whose matrices were rounded beforehand."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.decode import __main__ as command
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.decode import step
from paraxis.decode import weights
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models.text import tokenizer
from paraxis.sharding.tensor import int4
from paraxis.train.claims import experiment

TINY = dict(
  vocab_size=264, d_model=64, num_layers=2, num_heads=4, d_ff=128,
  embedding_init_std=1.0, tied_embedding=False,
)  # fmt: skip
MODELS = {
  'attention': dict(num_kv_heads=2, attention_bias=True),
  'latent attention': dict(
    pattern='A',
    latent=dict(rank=32, nope_dim=16, rope_dim=16, value_dim=16),
  ),
  'recurrences, convolutions': dict(
    pattern='MV', mamba=dict(head_dim=16, state=8)
  ),
  'experts beside an mlp': dict(
    experts=dict(count=4, d_ff=32, pattern='DE', shared=1)
  ),
}
MESHES = {'tensor=2': 2, 'data=2,fsdp=2,tensor=2': 8}


def made(mesh='', devices=1, dtype='float32', **model):
  wide = dict(dtype=dtype, param_dtype=dtype)
  config = schema.view(
    {'model': TINY | wide | model, 'mesh': dict(sequence=False)}
  )
  built = build.build(config, mesh, devices=jax.devices()[:devices])
  values = module_cases.parameters(built.model, 0.3)
  return built, module_cases.placed(built, values)


def rounded(built, params, group):
  """Parameters whose matrices of layers are whole steps, by definition."""
  out = {p: np.asarray(x) for p, x in params.items()}
  for p, x in out.items():
    inputs, axes = built.model.inputs[p], built.model.axes[p]
    if not p.startswith('layers/') or built.model.kinds[p] != 'matrix':
      continue
    rows = math.prod(x.shape[1 : 1 + inputs])
    if 'experts' in axes or 'choices' in axes or rows % group:
      continue
    parts = x.reshape(len(x), rows // group, group, -1)
    step = np.abs(parts).max(2, keepdims=True) / 7
    step = np.asarray(np.asarray(step, jnp.bfloat16), x.dtype)
    whole = np.clip(np.rint(parts / step), -7, 7) * step
    out[p] = whole.reshape(x.shape)
  return {p: jax.device_put(x, params[p].sharding) for p, x in out.items()}


def logits(built, params, **decode):
  """Of a prompt and of three tokens after it, (rows, 8, V)."""
  config = dataclasses.replace(schema.Decode(), **decode)
  ids = np.random.default_rng(0).integers(0, 264, (8, 8)).astype('i4')
  model = built.model

  def run(params, tokens, lengths):
    loose = weights.prepare(model, params, config)
    x, cache = step.prefill(model, loose, tokens[:, :5], lengths, 16)
    out, live = [model.logits(loose, x)], lengths > 0
    for i in range(5, 8):
      z, cache = step.advance(model, loose, cache, tokens[:, i], live)
      out.append(z[:, None])
    return jnp.concatenate(out, 1)

  with build.use(built):
    placed = step.place(ids[:, :5].tolist(), 5, built.mesh)[1]
    return np.asarray(jax.jit(run)(params, step.put(ids, built.mesh), placed))


@pytest.mark.parametrize('name', MODELS)
def test_logits_are_those_of_rounded_weights(name):
  """Prefill and decoding, float64; groups of 32."""
  with jax.enable_x64(True):
    built, params = made(dtype='float64', **MODELS[name])
    found = logits(built, params, weights='int4', weight_group=32)
    wanted = logits(built, rounded(built, params, 32))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
    # Not rounded they are others.
    assert np.abs(logits(built, params) - wanted).max() > 1e-2


@pytest.mark.parametrize('mesh', ['', *MESHES])
def test_parameters_as_training_has_them(mesh):
  """Of scores: the same numbers, in stacks, wherever they are."""
  built, params = made(mesh, MESHES.get(mesh, 1), num_kv_heads=2)
  config = schema.Decode(weights='int4', weight_group=32)
  with build.use(built):
    read = jax.jit(lambda p: weights.rounded(built.model, p, config))
    found = read(params)
  wanted, changed = rounded(built, params, 32), 0
  assert found.keys() == wanted.keys()
  for path, x in wanted.items():
    np.testing.assert_allclose(found[path], x, rtol=1e-6, atol=1e-7)
    changed += bool((np.asarray(found[path]) != np.asarray(params[path])).any())
  assert changed == 7  # query, key, value, output, gate, up, down
  same = weights.rounded(built.model, params, schema.Decode())
  assert all(same[path] is params[path] for path in params)


@pytest.mark.parametrize('mesh', MESHES)
def test_meshes(mesh):
  built, params = made(num_kv_heads=2)
  kept = dict(weights='int4', weight_group=32)
  wanted = logits(built, params, **kept)
  found = logits(*made(mesh, MESHES[mesh], num_kv_heads=2), **kept)
  np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_a_wrong_scale_is_seen(monkeypatch):
  built, params = made()
  sound, make = logits(built, params, weights='int4'), int4.make

  def wrong(*args, **named):
    kept = make(*args, **named)
    return dataclasses.replace(kept, scale=jnp.roll(kept.scale, 1, 1))

  monkeypatch.setattr(int4, 'make', wrong)
  assert np.abs(logits(built, params, weights='int4') - sound).max() > 1e-2


@pytest.mark.parametrize('weight', ['loaded', 'int4'])
@pytest.mark.parametrize('leaf', ['bias', 'router'])
def test_routers_choose_as_in_training(leaf, weight):
  """In bfloat16, by differences that it has no digits for."""
  experts = dict(count=8, d_ff=32, scores='sigmoid', bias_rate=1e-3)
  built, params = made(dtype='bfloat16', param_dtype='float32', experts=experts)
  near = 1 + 1e-3 * np.random.default_rng(1).permutation(8)
  bias, router = 'layers/moe/bias', params['layers/moe/router']
  if leaf == 'bias':
    params[bias] = 0 * params[bias] + near
    params['layers/moe/router'] = 0 * router
  else:
    params[bias] = 0 * params[bias]
    params['layers/moe/router'] = router[..., :1] * near
  kept = dict(weights=weight, weight_group=32)
  found, model = logits(built, params, **kept), built.model
  ids = np.random.default_rng(0).integers(0, 264, (8, 8)).astype('i4')
  ones = np.ones_like(ids)
  data = batch_lib.Batch(ids, None, ones, np.cumsum(ones, 1) - 1, None, 1.0)

  def whole(params):
    read = weights.rounded(model, params, schema.Decode(**kept))
    return model.logits(read, model.features(read, data)[0])

  with build.use(built):
    wanted = np.asarray(jax.jit(whole)(params))
  far = np.abs(found - wanted).max(-1) / np.abs(wanted).max()
  assert far.max() < 0.05, far


def test_convolutions_are_those_of_training():
  """In bfloat16, by a difference of taps that it has no digits for: of a token
  that is repeated, 1 + 1 / 300 times what it was less what it was."""
  built, params = made(
    dtype='bfloat16', param_dtype='float32', pattern='V', num_layers=1
  )
  model, conv, output = (
    built.model,
    *(f'layers/short_conv/{name}' for name in ('conv', 'output')),
  )
  params[conv] = (0 * params[conv]).at[:, :2].set([[1 + 1 / 300], [-1]])
  params[output] = 300 * params[output]
  ids = np.random.default_rng(0).integers(0, 264, (8, 1)).astype('i4')
  ids = np.repeat(ids, 8, 1)
  ones = np.ones_like(ids)
  data = batch_lib.Batch(ids, None, ones, np.cumsum(ones, 1) - 1, None, 1.0)

  def both(params, tokens, lengths):
    loose = weights.prepare(model, params, schema.Decode())
    x, _ = step.prefill(model, loose, tokens, lengths, 16)
    y, _ = model.features(params, data)
    return model.logits(loose, x), model.logits(params, y)

  with build.use(built):
    placed = step.place(ids.tolist(), 8, built.mesh)[1]
    found, wanted = jax.jit(both)(params, step.put(ids, built.mesh), placed)
  far = np.abs(found - wanted).max(-1) / np.abs(wanted).max(-1)
  assert far.max() < 0.05, far


@pytest.mark.parametrize('pattern, mixers', [('VMSGDURLC', 9), ('HF', 1)])
def test_taps_stay_as_they_are(pattern, mixers):
  built, params = made(
    dtype='bfloat16', param_dtype='float32', pattern=pattern,
    num_layers=len(pattern), mamba=dict(head_dim=16, state=8),
    gated_linear=dict(conv_width=4), recurrent=dict(heads=4),
  )  # fmt: skip
  taps = re.compile(r'/(\w*conv|taps|taps_\d+)$').search
  assert len({p.split('/')[1] for p in params if taps(p)}) == mixers
  config = schema.Decode()
  prepare = functools.partial(weights.prepare, built.model, config=config)
  kept = jax.eval_shape(prepare, params)
  narrow = {p for p, x in kept.items() if x.dtype == jnp.bfloat16}
  assert narrow and not any(map(taps, narrow))


def nbytes(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize('group', [32, 64])
def test_bytes(group):
  """Half a byte a weight and two a group; the rest as it was."""
  built, params = made()
  prepare = functools.partial(
    weights.prepare,
    built.model,
    config=schema.Decode(weights='int4', weight_group=group),
  )
  d, f, layers, vocab = 64, 128, 2, 264
  matrices = layers * (4 * d * d + 3 * d * f)
  rest = 2 * vocab * d + d + layers * 2 * d
  assert sum(x.size for x in params.values()) == matrices + rest
  wanted = matrices // 2 + 2 * matrices // group + 4 * rest
  with build.use(built):
    assert nbytes(jax.jit(prepare)(params)) == wanted
  assert nbytes(params) == 4 * (matrices + rest) > 3 * wanted / 2


def test_of_each_matrix_the_largest_group_that_divides_it():
  built, params = made(d_model=96, num_heads=2, head_dim=32, d_ff=128)
  found = weights._groups(built.model, params, 0)
  inside = {p.removeprefix('layers/'): group for p, group in found.items()}
  assert inside == {
    'attention/query': 32, 'attention/key': 32, 'attention/value': 32,
    'attention/output': 64, 'mlp/gate': 32, 'mlp/up': 32, 'mlp/down': 128,
  }  # fmt: skip


@pytest.mark.parametrize(
  'model, mesh, decode, words',
  [
    (dict(), '', dict(weight_group=48), ['weight_group=48', '32, 64, 128']),
    (dict(), '', dict(weight_group=128),
     ['has 64 inputs', '128', 'weight_group=64']),
    (dict(d_model=40, num_heads=2, head_dim=20, d_ff=40), '', dict(),
     ['no matrix', '32']),
    (dict(), 'tensor=4', dict(),
     ['attention/output has 64 inputs', '16 on each of 4 shards', '64',
      'another mesh']),
    (dict(), 'tensor=2', dict(),
     ['32 on each of 2 shards', '64', 'weight_group=32']),
    (dict(), 'tensor=2', dict(weight_group=64),
     ['32 on each of 2 shards', 'weight_group=32']),
  ],
)  # fmt: skip
def test_one_line_each(model, mesh, decode, words):
  devices = int(mesh[-1:] or 1)
  built, params = made(mesh, devices, **model)
  config = schema.Decode(weights='int4', **decode)
  with support.refused(*words):
    loop.Generator(built, params, tokenizer.Bytes(), config)


@pytest.mark.parametrize(
  'model, words',
  [
    (dict(d_ff=40), '1 of 7 matrices .*: layers/mlp/down .40 inputs.$'),
    (MODELS['experts beside an mlp'],
     '4 of .* matrices .*: layers/moe/down .of experts., [^0-9]*$'),
    (dict(), ''),
    (dict(d_model=40, num_heads=2, head_dim=20, d_ff=40), ''),  # refused
  ],
)  # fmt: skip
def test_what_stays_is_said(model, words):
  built, params = made(**model)
  said = weights.stays(built.model, params, schema.Decode(weights='int4'))
  assert re.search(words, said) and bool(said) == bool(words), said
  assert not weights.stays(built.model, params, schema.Decode())


def test_a_run_says_what_stays(tmp_path):
  config = schema.view({'model': TINY | dict(vocab_size=2048, d_ff=40)})
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  params = module_cases.parameters(built.model, 0.3)
  saved = {p: jnp.asarray(x) for p, x in params.items()}
  run, said = support.save_run(tmp_path / 'run', config, built, saved), []
  with load.Checkpoint(run, say=said.append) as checkpoint:
    for kept in ('loaded', 'int4'):
      asked = {'decode.weights': kept}
      given = schema.view(checkpoint.config())
      checkpoint.parts(experiment.fields(given, asked), 'data=8')
  assert len([line for line in said if 'stay as loaded' in line]) == 1
  assert 'layers/mlp/down (40 inputs)' in said[-1]


def test_laid_out_once():
  built, params = made()
  whole = loop.Generator(built, params, tokenizer.Bytes(), schema.Decode())
  with support.refused('decode.weights', "'loaded'", "'int4'"):
    whole.generate(['a'], weights='int4')


def test_the_command(tmp_path, capsys):
  """Text of a checkpoint, by its matrices in 4 bits."""
  config = schema.view({'model': TINY | dict(vocab_size=2048)})
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  params = module_cases.parameters(built.model, 0.3)
  params = {p: jnp.asarray(x) for p, x in params.items()}
  other = {p: jnp.asarray(x) for p, x in rounded(built, params, 64).items()}
  runs = {
    name: support.save_run(tmp_path / name, config, built, values)
    for name, values in (('as_is', params), ('rounded', other))
  }

  def tokens(name, *flags):
    argv = [
      f'--checkpoint={runs[name]}', '--prompt=The', '--temperature=0',
      '--max_new_tokens=12', '--json', '--devices=1', *flags,
    ]  # fmt: skip
    assert command_line.run(command.main, argv) == 0
    return json.loads(capsys.readouterr().out)['samples'][0]['tokens']

  flags = '--config.decode.weights=int4', '--config.decode.weight_group=64'
  found = tokens('as_is', *flags)
  assert found == tokens('rounded') != tokens('as_is')
  argv = [f'--checkpoint={runs["as_is"]}', '--prompt=The', flags[0],
          '--config.decode.weight_group=50']  # fmt: skip
  assert command_line.run(command.main, argv) == 2
  assert 'weight_group=50' in capsys.readouterr().err
