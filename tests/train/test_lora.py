"""train.lora: y = x W + (alpha / rank) x A B, with W frozen.

Gradients are compared with those of the merged weights, of a model without
adapters, by the chain rule: dA = s dW B^T, dB = s A^T dW.
"""

import re
import shutil

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import load
from paraxis.models import parameter
from paraxis.models.huggingface import source as source_lib
from paraxis.train import exchange
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train.certify import trial
from paraxis.train.run import origin as origin_lib

RANK, ALPHA = 3, 6.0
LORA = {'train.lora.rank': RANK, 'train.lora.alpha': ALPHA}
SMALL = {
  'model.gated_linear.gate_rank': 4,
  'model.mamba.head_dim': 4,
  'model.mamba.state': 8,
  'model.mamba.dt_rank': 2,
  'model.recurrent.heads': 4,
  'model.recurrent.solver': 'sequential',
  'model.latent.rank': 8,
  'model.latent.query_rank': 8,
}
EXPERTS = {
  'model.experts.count': 4,
  'model.experts.d_ff': 8,
  'model.experts.shared': 1,
  'model.experts.region': '',
}
MODELS = {
  'attention': {},
  'gpt': {'model.attention_bias': True, 'model.mlp_bias': True,
          'model.mlp': 'gelu', 'model.unroll': 4},
  'latent, linear': {'model.pattern': 'AG'} | SMALL,
  'mamba': {'model.pattern': 'MS'} | SMALL,
  'recurrent': {'model.pattern': 'RC'} | SMALL,
  'experts': EXPERTS,
  'gate': EXPERTS
  | {
    'model.experts.shared_gate': True,
    'train.lora.targets': '*/shared_gate,layers/attention/*',
  },
}  # fmt: skip
LAYOUTS = {
  'annotated': dict(mesh=dict(data=2, fsdp=2, tensor=2, zero=1)),
  'whole': dict(mesh=dict(data=2, context=2, tensor=2, sequence=False)),
  'explicit': dict(
    mesh=dict(fsdp=2, context=2, tensor=2, collectives='explicit')
  ),
  'rings': dict(mesh=dict(data=2, tensor=4, collective_matmul='all')),
  'zero_bubble': dict(
    mesh=dict(stage=2, fsdp=2, tensor=2), pipeline=dict(schedule='zero_bubble')
  ),
}


def _config(changes=(), layers=2, **layout):
  plain = support.piped(**layout, layers=layers)
  return schema.with_values(plain, LORA | dict(changes))


def _runner(config):
  return trial.Runner(config, jax.devices()[:1])


def _merged(params, scale=ALPHA / RANK):
  """The same without adapters, in a loop over layers of NumPy."""
  out = {p: x for p, x in params.items() if '_lora_' not in p}
  for path, w in out.items():
    if f'{path}_lora_a' in params:
      a, b = (params[f'{path}_lora_{n}'] for n in 'ab')
      rank = a.shape[-1]
      a, b = a.reshape(len(a), -1, rank), b.reshape(len(b), rank, -1)
      rows = [scale * x @ y for x, y in zip(a, b, strict=True)]
      out[path] = w + np.reshape(rows, w.shape)
  return out


def _chain(params, gradients):
  """Gradients of the adapters from those of the merged parameters."""
  out = {}
  for path, dw in gradients.items():
    if f'{path}_lora_a' in params:
      a, b = (params[f'{path}_lora_{n}'] for n in 'ab')
      flat = a.reshape(len(a), -1, RANK), b.reshape(len(b), RANK, -1)
      dw = dw.reshape(len(dw), flat[0].shape[1], -1)
      of_a = [g @ y.T for g, y in zip(dw, flat[1], strict=True)]
      of_b = [x.T @ g for g, x in zip(dw, flat[0], strict=True)]
      out[f'{path}_lora_a'] = ALPHA / RANK * np.reshape(of_a, a.shape)
      out[f'{path}_lora_b'] = ALPHA / RANK * np.reshape(of_b, b.shape)
  return out


def _differences(changes):
  """(gradients, those by the chain rule, both losses) of a model."""
  config = _config(changes)
  found = trial.reference(config, True, jax.devices()[0])
  off = {'train.lora.rank': 0, 'train.lora.targets': ''}
  plain = _runner(schema.with_values(config, off))
  state = plain.start(_merged(found.params))
  loss, of_merged, _ = plain.gradients(state, found.batches[0])
  wanted = _chain(found.params, jax.device_get(of_merged))
  return found.gradients, wanted, found.loss, float(loss)


@pytest.mark.parametrize('name', MODELS)
def test_gradients_by_the_chain_rule(double, name):
  gradients, wanted, loss, plain = _differences(MODELS[name])
  assert loss == pytest.approx(plain, rel=1e-12)
  support.close(gradients, wanted, 1e-9)
  assert all(np.abs(x).max() > 1e-6 for x in wanted.values())


def test_a_product_that_is_left_out_shows(double, monkeypatch):
  monkeypatch.setattr(parameter, '_low_rank', lambda *args: [])
  gradients, wanted, loss, plain = _differences({'model.d_ff': 20})
  assert abs(loss - plain) > 1e-3
  with pytest.raises(AssertionError):
    support.close(gradients, wanted, 1e-9)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_layout(double, layout):
  rows = support.certify(_config(layers=4, **LAYOUTS[layout]))
  assert len(rows) == 3 and all(row.passed for row in rows), rows


def test_experts_on_a_mesh(double):
  """Their attention has adapters."""
  mesh = dict(data=2, fsdp=2, tensor=2, collectives='explicit')
  changes = EXPERTS | {'model.experts.region': 'tensor'}
  rows = support.certify(_config(changes, mesh=mesh))
  assert all(row.passed for row in rows), rows


def test_exact_at_zero(tiny):
  """The first state has the base and, bit for bit, the logits of none."""
  found = []
  for rank in (0, 4):
    job = tiny.job({'train.lora.rank': rank, 'model.dtype': 'bfloat16'})
    with job.context():
      params = job.initial_state().params
      batch = job.put(next(iter(job.batches.iterate(0)))[1])
      logits = jax.jit(
        lambda p, b, m=job.model: m.logits(p, m.features(p, b)[0])
      )
      found.append((jax.device_get(params), np.asarray(logits(params, batch))))
  (plain, wanted), (params, logits) = found
  assert set(plain) < set(params)
  assert all(np.array_equal(params[p], x) for p, x in plain.items())
  assert np.array_equal(logits, wanted)
  a, b = (params[f'layers/mlp/up_lora_{n}'] for n in 'ab')
  assert a.shape[-1] == 4 and np.any(a) and not np.any(b)


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_the_optimizer_holds_adapters_alone(tiny, name):
  job = tiny.job({'train.lora.rank': 2, 'optimizer.name': name})
  params, axes = job.state.params, state_lib.axes(job.leaves)
  adapters = [p for p in params if '_lora_' in p]
  held = state_lib.flatten(job.state.optimizer)
  numbers = sum(x.size for x in held.values() if x.ndim > 2)
  times = 1 if name == 'muon' else 2
  assert numbers == times * sum(params[p].size for p in adapters)
  assert sum(x.size for x in held.values() if x.ndim < 3) < 8
  query, a, b = (
    f'params/layers/attention/query{end}' for end in ('', '_lora_a', '_lora_b')
  )
  assert axes[a] == (*axes[query][:2], None)
  assert axes[b] == ('layers', None, *axes[query][2:])


def test_no_gradient_of_the_base_is_formed(double):
  """No product has the shape of a matrix of the mlp."""
  shape = {'model.d_model': 28, 'model.d_ff': 52, 'model.unroll': 2}
  found = {}
  for rank in (0, RANK):
    config = _config(shape | {'train.lora.rank': rank, 'model.num_heads': 2})
    runner = _runner(config)
    reference = trial.reference(config, True, jax.devices()[0])
    state = runner.start(reference.params)
    with runner.job.context():
      batch = runner.put(reference.batches[0])
      text = (
        runner._grads.lower(state.variables, batch).compile().as_text() or ''
      )
    found[rank] = len(re.findall(r'f64\[(?:28,52|52,28)\]\S* dot\(', text))
  assert found[0] > 0 and found[RANK] == 0, found


MESH = 'data=2,fsdp=2,tensor=2'
STEPS = {'train.eval_batches': 0, 'checkpoint.every': 2, 'train.steps': 2}
FAST = STEPS | {
  'optimizer.name': 'adamw',
  'optimizer.learning_rate': 0.05,
  'optimizer.schedule': 'constant',
}
RUN = FAST | {'train.lora.rank': 2, 'train.lora.alpha': 4.0}


@pytest.fixture(scope='module')
def run(tiny, tmp_path_factory):
  """A run of 2 steps with adapters."""
  path = tmp_path_factory.mktemp('lora') / 'run'
  tiny.run(path, RUN, MESH)
  return path


def _saved(path, step=2):
  """{path: array} of the parameters of a run."""
  source = origin_lib.Run(f'{path}/{step}')
  with source._store() as store:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {
      p: jax.ShapeDtypeStruct(tuple(x['shape']), x['dtype'], sharding=here)
      for p, x in source._saved.items()
    }
    tree, _ = store.restore(step, like)
  tree = {p: np.asarray(x) for p, x in tree.items()}
  return {p[7:]: x for p, x in tree.items() if p.startswith('params/')}


def _sum(params):
  """Merged in float64, as RUN scales them."""
  return _merged({p: x.astype('f8') for p, x in params.items()}, 2.0)


def test_a_run_resumes_on_another_mesh(tiny, run, tmp_path):
  """And its base is as at the start, bit for bit."""
  params = _saved(run)
  shutil.copytree(run, tmp_path / 'run')
  more = RUN | {'train.steps': 3}
  result, said = tiny.run(tmp_path / 'run', more, 'data=2,stage=2')
  assert result['step'] == 3 and 'resumed from step 2' in '\n'.join(said)
  later = _saved(tmp_path / 'run', 3)
  job = tiny.job(RUN)
  with job.context():
    first = jax.device_get(job.initial_state().params)
  assert set(first) == set(params) == set(later)
  for path, x in later.items():
    assert np.array_equal(x, params[path]) == ('_lora_' not in path), path
    assert np.array_equal(x, first[path]) == ('_lora_' not in path), path


def test_export_merges(run, tmp_path):
  exchange.send(run, tmp_path / 'out', say=lambda line: None)
  wanted = _sum(_saved(run))
  found = source_lib.Source(str(tmp_path / 'out'))
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  base = _saved(run)
  for path, x in wanted.items():
    like = jax.ShapeDtypeStruct(x.shape, 'float32', sharding=here)
    read = np.asarray(found.read(path, like))
    np.testing.assert_allclose(read, x, rtol=1e-6, atol=1e-7)
    same = np.array_equal(read, base[path])
    assert same != (f'{path}_lora_a' in base), path


def test_decode_merges(run):
  with load.Checkpoint(run) as checkpoint:
    config = schema.view(checkpoint.config())
    built, params, *_ = checkpoint.parts(config, MESH)
  assert set(params) == set(built.params)
  support.close(jax.device_get(params), _sum(_saved(run)), 1e-6)


def test_a_new_run_begins_with_all_of_it(tiny, run):
  """The same adapters go on; others begin with the sum; so does none."""
  wanted = _sum(_saved(run))
  for changes, lines in (
    ({}, []),
    ({'train.lora.rank': 3}, ['7 adapters are merged', '7 adapters are new']),
    ({'train.lora.rank': 0}, ['7 adapters are merged']),
  ):
    job, said = tiny.job(RUN | changes, MESH), []
    like = state_lib.in_order(state_lib.flatten(job.state), job.leaves)
    source = origin_lib.open_(str(run))
    made = start.begin(job, source, like, said.append)
    params = jax.device_get(made.params)
    assert [x for x in said if 'adapters' in x] == [
      f'--init_from: {"its " * ("merged" in x)}{x}' for x in lines
    ]
    assert all(np.any(x) for p, x in params.items() if p.endswith('_a'))
    same = not changes
    assert same == any(np.any(x) for p, x in params.items() if p[-2:] == '_b')
    found = _sum(params) if same else params
    base = {p: x for p, x in found.items() if '_lora_' not in p}
    support.close(base, wanted, 1e-6)


def test_adapters_on_a_base_without(tiny, run, tmp_path):
  """--init_from of a plain run, and of a folder of another program."""
  tiny.run(tmp_path / 'plain', FAST, MESH)
  exchange.send(tmp_path / 'plain', tmp_path / 'out', say=lambda line: None)
  base = _saved(tmp_path / 'plain')
  for origin in ('plain', 'out'):
    job, said = tiny.job(RUN, MESH), []
    like = state_lib.in_order(state_lib.flatten(job.state), job.leaves)
    source = origin_lib.open_(str(tmp_path / origin))
    made = start.begin(job, source, like, said.append)
    found = jax.device_get(made.params)
    assert all(np.array_equal(found[p], x) for p, x in base.items())
    assert len(found) == len(base) + 14
