"""Every family of models/huggingface against `transformers`, by its own leaves.

    python tests/hf_families.py [NAME ...] [--write] [--trace] [--table]

A NAME is a row of hf_tiny.py, hf_tiny_experts.py or hf_masked.py; without one,
all of them.
--write keeps in tests/golden/peers what `transformers` computed, which
tests/models/huggingface/test_families.py reads where there is no torch; --table
writes models/huggingface/FAMILIES.md; --trace shows where an error is. Nothing
is fetched: models are tiny, weights follow from tensors' names (peers.weight).

Legend: B rows, T tokens, V vocabulary.
"""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')

import hf_masked
import hf_tiny
import hf_tiny_experts
import jax
import numpy as np
import peers
from safetensors import numpy as safetensors

from paraxis.configs.base import errors
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface import leaves as leaves_lib
from paraxis.models.huggingface.families import absent
from paraxis.models.huggingface.families import known
from paraxis.models.huggingface.families import masked as masked_lib
from paraxis.train import loss

TINY = hf_tiny.DENSE | hf_tiny_experts.EXPERTS | hf_masked.MASKED
TOLERANCE = peers.TOLERANCE
B, T = 2, 24
EAGER = dict(attn_implementation='eager', experts_implementation='eager')
FLAT = 1e-3  # of the largest: gradients below are measured by that
DATA = peers.rows(hf_tiny.V, (B, T))


class Found(NamedTuple):
  """What a model of `transformers` is and computes, in names of its files.

  config: its config.json. every: with all defaults written out. weights,
  gradients: {tensor: array}; tensors that get no gradient have none. logits:
  z_BTV.
  """

  config: dict[str, Any]
  every: dict[str, Any]
  weights: dict[str, np.ndarray]
  gradients: dict[str, np.ndarray]
  logits: np.ndarray


def type_of(name):
  """model_type of a row."""
  return TINY[name].get('model_type', name)


def spread_of(name):
  return TINY[name].get('spread', 0.3)


def ours_of(name):
  return TINY[name].get('ours', {})


# --------------------------------------------------------------- transformers


@functools.lru_cache(2)
def theirs(name) -> Found:
  """Of a row."""
  if name in hf_masked.MASKED:
    return masked(TINY[name], spread_of(name))
  return computed(hf_config(name), spread_of(name))


def masked(config, spread) -> Found:
  """Of a config.json whose class is another's, with a mask."""
  return Found(config, config, *hf_masked.computed(config, spread, DATA))


def _again(name, written) -> Found:
  """Of a config.json that we wrote of a row."""
  if name in hf_masked.MASKED:
    return masked(written, spread_of(name))
  made = type(hf_config(name))(**written | dict(pad_token_id=None))
  return computed(made, spread_of(name))


def computed(made, spread) -> Found:
  """Of a config of `transformers`."""
  import hf_peer  # skips without torch

  auto = hf_peer.transformers.AutoModelForCausalLM
  model = hf_peer.randomised(lambda: auto.from_config(made, **EAGER), spread)
  state = lambda: {k: v.numpy() for k, v in model.state_dict().items()}
  if set(saved(model, state())) != set(state()):
    # Files have other tensors than the modules: it is they that are drawn.
    model = _loaded(auto, made, saved(model, state()), spread)
  logits, _, grads = hf_peer.gradients_of(model, DATA)
  return Found(
    json.loads(made.to_json_string(use_diff=True)),
    json.loads(made.to_json_string(use_diff=False)),
    saved(model, state()),
    saved(model, grads),
    logits,
  )


def _loaded(auto, made, tensors, spread):
  """A model of files with tensors of these names and shapes."""
  import hf_peer

  if made.tie_word_embeddings:  # a head of its own would untie them
    tensors = {k: x for k, x in tensors.items() if k != 'lm_head.weight'}
  drawn = {k: peers.weight(k, x.shape, spread) for k, x in tensors.items()}
  with tempfile.TemporaryDirectory() as folder, hf_peer.float64():
    made.save_pretrained(folder)
    file = pathlib.Path(folder) / 'model.safetensors'
    safetensors.save_file(drawn, file, dict(format='pt'))
    wide = hf_peer.torch.float64
    return auto.from_pretrained(folder, dtype=wide, **EAGER).eval()


def hf_config(name):
  """Their config of a row."""
  import hf_peer

  row = dict(TINY[name])
  row.pop('spread', None)
  row.pop('ours', None)
  kind = row.pop('model_type', name)
  made = hf_peer.transformers.AutoConfig.for_model(kind)
  own = {f.name for f in dataclasses.fields(made)} | set(made.attribute_map)
  common = {k: v for k, v in hf_tiny.COMMON.items() if k in own}
  return hf_peer.transformers.AutoConfig.for_model(kind, **common | row)


def saved(model, tensors):
  """{name: array}, which has names of `model`, by names of its files."""
  import hf_peer

  name = 'transformers.core_model_loading'
  loading = importlib.import_module(name)

  torch = hf_peer.torch
  out = loading.revert_weight_conversion(
    model, {k: torch.tensor(v) for k, v in tensors.items()}
  )
  return {k: v.numpy() for k, v in out.items()}


# ----------------------------------------------------------------------- ours


def model_of(config, dtype='float64'):
  """schema.Model of a config.json, computed in that dtype."""
  return dataclasses.replace(
    config_lib.to_model(config),
    dtype=dtype, param_dtype=dtype, attention_block=8,
  )  # fmt: skip


def shapes_of(model):
  """{path: shape} of a schema.Model's parameters."""
  made = jax.eval_shape(decoder.Decoder(model).init, jax.random.key(0))
  return {path: x.shape for path, x in made.items()}


def tree_of(leaves, tensors, dtype='float64'):
  """{path: parameter} of {name: tensor}; a leaf that lacks one is left out."""
  stacks, flat = {}, {}
  for leaf in leaves:
    if any(name not in tensors for name in leaf.names):
      continue
    value = leaf.ours(*(tensors[name] for name in leaf.names))
    if leaf.layer is None:
      flat[leaf.path] = value
    else:
      stacks.setdefault(leaf.path, {})[leaf.layer] = value
  for path, each in stacks.items():
    assert sorted(each) == list(range(len(each))), path
    flat[path] = np.stack([each[i] for i in range(len(each))])
  return {p: np.asarray(x, dtype) for p, x in flat.items()}


def ours(model, params, data=DATA):
  """(z_BTV, {path: gradient of the loss})."""
  model_checks.check_model(model)
  made, wanted = decoder.Decoder(model), shapes_of(model)
  found = {p: x.shape for p, x in params.items()}
  assert found == wanted, set(found.items()) ^ set(wanted.items())

  def mean(params):
    z = made.logits(params, made.features(params, data)[0])
    nats: Any = loss.negative_log_likelihood(z, data.targets)
    return nats.mean(), z

  grads, logits = jax.jit(jax.grad(mean, has_aux=True))(params)
  return logits, grads


def learned(model):
  """Paths that get a gradient."""
  kinds = decoder.Decoder(model).kinds
  return {
    p for p, kind in kinds.items() if kind not in ('balance', 'statistic')
  }


def weights_of(model, leaves, spread):
  """{name: tensor} of every tensor that leaves name, by peers.weight."""
  model = dataclasses.replace(model, dtype='float32', param_dtype='float32')
  shapes, tensors = shapes_of(model), {}
  for leaf in leaves:
    shape = shapes[leaf.path]
    zeros = np.zeros(shape if leaf.layer is None else shape[1:])
    leaves_lib.put(tensors, leaf, zeros)
  return {k: peers.weight(k, x.shape, spread) for k, x in tensors.items()}


# ---------------------------------------------------------------- comparisons


def compare(name) -> dict[str, float]:
  """{what: its distance, of the largest}: logits, and every gradient.

  AssertionError: tensors that we leave or lack, or a round trip that changes
  the config, a tensor, or what `transformers` computes.
  """
  found = theirs(name)
  model = dataclasses.replace(model_of(found.config), **ours_of(name))
  kind = type_of(name)
  leaves = leaves_lib.table(model, kind)
  _check_round_trip(name, found, model, leaves)
  logits, grads = ours(model, tree_of(leaves, found.weights))
  out = {'logits': peers.distance(logits, found.logits)}
  wanted = _gradients(model, leaves, found)
  largest = max(np.abs(x).max() for x in wanted.values())
  for path, x in wanted.items():
    least = np.maximum(np.abs(x).max(), FLAT * largest)
    out[path] = float(np.abs(np.asarray(grads[path]) - x).max() / least)
  assert all(np.isfinite(list(out.values())))
  return out


def _gradients(model, leaves, found):
  """{path: gradient} of theirs; AssertionError: one of ours has none."""
  every, wanted = tree_of(leaves, found.gradients), learned(model)
  assert wanted <= set(every), f'no gradient of {wanted - set(every)}'
  return {path: every[path] for path in every if path in wanted}


def _check_round_trip(name, found, model, leaves):
  """Config to model and back, and tensors to parameters and back."""
  kind = type_of(name)
  same = config_lib.canonical
  assert same(config_lib.to_model(found.every)) == same(model)
  written = config_lib.from_model(model, kind)
  assert same(config_lib.to_model(written)) == same(model)
  back = {}
  for leaf in leaves:
    array = leaf.ours(*(found.weights[k] for k in leaf.names))
    leaves_lib.put(back, leaf, array)
  for key, tensor in found.weights.items():
    if key not in back:
      assert leaves_lib.ignored(key, model), f'{key} is no parameter of ours'
      continue
    whole = back.pop(key)
    assert whole.dtype == tensor.dtype and np.array_equal(whole, tensor), key
  assert not back, f'{set(back)} are no tensors of theirs'
  again = _again(name, written)
  far = peers.distance(again.logits, found.logits)
  assert far < TOLERANCE, f'the config that we write is {far} away'


# --------------------------------------------------------------------- golden


def write_golden(name, made_by):
  """Writes what `transformers` computes of a row."""
  found = theirs(name)
  model = dataclasses.replace(model_of(found.config), **ours_of(name))
  leaves = leaves_lib.table(model, type_of(name))
  gradients = _gradients(model, leaves, found)
  seen, of_grads = peers.numbers(found.logits, gradients)
  short = lambda x: [float(f'{v:.13g}') for v in np.ravel(x)]
  record = dict(
    made_by=made_by,
    spread=spread_of(name),
    config=found.config,
    ours=ours_of(name),
    shape=list(seen.shape),
    logits=short(seen),
    gradients={p: short(v) for p, v in of_grads.items()},
  )
  lines = json.dumps(record).replace(', "', ',\n"')
  (peers.GOLDEN / f'{name}.json').write_text(lines + '\n', 'utf-8')


def read_golden(name):
  return json.loads((peers.GOLDEN / f'{name}.json').read_text('utf-8'))


def params_of(record):
  """(schema.Model, its parameters) of a golden."""
  model = model_of(record['config'])
  model = dataclasses.replace(model, **record.get('ours', {}))
  leaves = leaves_lib.table(model, record['config']['model_type'])
  weights = weights_of(model, leaves, record['spread'])
  return model, tree_of(leaves, weights)


def against_golden(name, **changes):
  """(distance of logits, {path: distance} of gradients that are too far).

  changes: of schema.Model, which the golden's config.json does not say.
  """
  record = read_golden(name)
  model, params = params_of(record)
  model = dataclasses.replace(model, **changes)
  seen, of_grads = peers.numbers(*ours(model, params))
  wanted = {p: np.array(v) for p, v in record['gradients'].items()}
  largest = max(v[0] for v in wanted.values())
  far = {
    p: np.abs(of_grads[p] - v).max() / max(v[0], FLAT * largest)
    for p, v in wanted.items()
  }
  far = {p: float(x) for p, x in far.items() if not x <= TOLERANCE}
  logits = np.reshape(record['logits'], record['shape'])
  return peers.distance(seen, logits), far


# ---------------------------------------------------------------------- table

TABLE = pathlib.Path(config_lib.__file__).parent / 'FAMILIES.md'


def causal_types():
  """model_types of the causal models of `transformers`."""
  auto = 'transformers.models.auto.modeling_auto'
  return importlib.import_module(auto).MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def sources_of(name):
  """Text of the modules that compute a model_type of `transformers`."""
  auto = 'transformers.models.auto.configuration_auto'
  models = importlib.import_module('transformers.models').__file__
  module = importlib.import_module(auto).model_type_to_module_name(name)
  files = (pathlib.Path(str(models)).parent / module).glob('modeling_*.py')
  return '\n'.join(file.read_text('utf-8') for file in files)


def answer(name):
  """What the table says of a model_type: what find() does with it."""
  try:
    known.find(name)
    return 'exact'
  except errors.UserError as error:
    if name not in absent.REASONS:
      raise AssertionError(
        f'{name} has neither a family nor a reason'
      ) from error
    assert absent.REASONS[name] in str(error), name
    return absent.REASONS[name]


def table(names):
  """FAMILIES.md of the model_types of transformers' causal models."""
  compared = {type_of(name) for name in TINY}
  assert compared == set(known.FAMILIES), compared ^ set(known.FAMILIES)
  own = hf_masked.PEERS
  assert set(own) == set(masked_lib.FAMILIES)
  more = [f'| {name} | exact, by {own[name]} |' for name in sorted(own)]
  rows = [f'| {name} | {answer(name)} |' for name in sorted(names)]
  return '\n'.join([
    '# Causal language models of transformers 5.23, by model_type', '',
    'Exact: logits, every gradient, config.json and tensors there and back are',
    'equal within 1e-9 in float64 (tests/hf_families.py, which writes this).',
    'The others are refused, with the part that is not here: its name is found',
    'in their source. Of an exact one, fields of config.json that ask for what',
    'is not here are refused by their names (tests/models/huggingface).', '',
    f'{len(known.FAMILIES) - len(own)} of {len(names)} are exact.', '',
    '| model_type | here, or the reason |', '|---|---|', *rows, '',
    '## Masked models whose classes are beside their weights', '',
    'That code is never run. Exact: equal, as above, to a model of',
    'transformers with the same weights, in which every token sees all others.',
    '',
    '| model_type | here, and what it is compared with |', '|---|---|', *more,
    '',
  ])  # fmt: skip


# ----------------------------------------------------------------------- main


def main(arguments):
  names = [a for a in arguments if not a.startswith('--')] or list(TINY)
  if '--table' in arguments:
    return TABLE.write_text(table(causal_types()), 'utf-8') and None
  unknown = sorted(set(names) - set(TINY))
  if unknown:
    sys.exit(f'no row is named {", ".join(unknown)}')
  import hf_peer

  versions = f'transformers {hf_peer.transformers.__version__}'
  versions += f', torch {hf_peer.torch.__version__}'
  failed = []
  for name in names:
    try:
      found = compare(name)
    except Exception as error:  # any: the others are compared all the same
      if '--trace' in arguments:
        raise
      print(f'{name:24} {type(error).__name__}: {error}', flush=True)
      failed.append(name)
      continue
    worst = max(found, key=found.__getitem__)
    print(f'{name:24} {found[worst]:.1e} {worst}', flush=True)
    if found[worst] >= TOLERANCE:
      failed.append(name)
    elif '--write' in arguments:
      write_golden(name, versions)
  print(f'{len(names) - len(failed)} of {len(names)} equal; not: {failed}')
  return bool(failed)


if __name__ == '__main__':
  with jax.enable_x64(True):
    sys.exit(main(sys.argv[1:]))
