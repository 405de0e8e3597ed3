"""Redco's rules: legal, Megatron's where that applies, equal to one device.

Programs here are laid out by parameter specs alone, as Redco lays them out: no
mesh is in force, no array is annotated, XLA propagates.

Legend: B rows, T tokens, V vocabulary, D model, N heads, K kv heads, H head
width, F mlp, L layers.
"""

import functools

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import mixers
from paraxis.configs.base.model import Experts
from paraxis.models import build
from paraxis.models import decoder
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.planner import auto_rules
from paraxis.train import loss
from paraxis.train.certify import trial
from paraxis.train.claims.layouts import auto_rules as claims_auto_rules

pytestmark = pytest.mark.usefixtures('float64')

B, T, V = 2, 8, 48
D, N, K, H, F = 16, 4, 2, 8, 24
TOLERANCE = 1e-9


FIELDS = dict(
  vocab_size=V, d_model=D, num_heads=N, num_kv_heads=K, head_dim=H, d_ff=F,
  num_layers=2, dtype='float64', param_dtype='float64', attention_block=8,
)  # fmt: skip
UNTIED = dict(tied_embedding=False)
GEMMA = dict(
  norm_placement='sandwich', norm_zero_centered=True, mlp='geglu', window=5,
  pattern='WF',
)  # fmt: skip
FAMILIES = dict(
  llama=UNTIED,
  qwen2=UNTIED | dict(attention_bias=True),
  qwen3=UNTIED | dict(qk_norm='head'),
  gemma2=GEMMA | dict(attention_softcap=2.0, logit_softcap=1.5),
  gemma3=GEMMA | dict(qk_norm='head', rope_local_theta=1e4),
  smollm3=dict(pattern='FN'),
  olmo2=UNTIED | dict(norm_placement='post', qk_norm='all'),
  gpt2=dict(
    num_kv_heads=0, head_dim=0, position='learned', max_positions=32,
    norm='layernorm', mlp='gelu', mlp_bias=True, attention_bias=True,
    attention_output_bias=True,
  ),
)  # fmt: skip


def config(name):
  return schema.Config(
    model=schema.Model(**FIELDS | FAMILIES[name]),
    data=schema.Data(sequence_length=T),
    train=schema.Train(batch_size=B),
  )


def model(name):
  return decoder.Decoder(config(name).model)


def shapes(name):
  return jax.eval_shape(model(name).init, jax.random.key(0))


@functools.cache
def parameters(name):
  """Random ones, biases and scales too, on the host."""
  rng = np.random.default_rng(0)
  draw = lambda x: rng.normal(0, 0.3, x.shape)
  return {p: draw(x) for p, x in shapes(name).items()}


@functools.cache
def program(name, size):
  """(compiled loss and gradients laid out by redco's specs, mesh, specs)."""
  specs = auto_rules.specs(shapes(name), size)
  text = f'tensor={size}'
  return *claims_auto_rules._from_specs(config(name), specs, text), specs


def run(name, size, params):
  """(loss, gradients) of `program`, on its devices."""
  step, *_ = program(name, size)
  data = trial.batches(config(name), False)[0]
  return step(*jax.device_put((params, data), step.input_shardings[0]))


def check(name, value, grads):
  """Equal to one device, relative to each leaf's maximum."""
  expected, by_path = jax.device_get(run(name, 1, parameters(name)))
  assert abs(value - expected) < TOLERANCE * expected
  assert set(grads) == set(by_path)
  for path, g in grads.items():
    # Without rotation a key bias shifts all scores of a query alike: its
    # gradient is rounding around 0.
    scale = np.abs(by_path[path.replace('key_bias', 'query_bias')]).max()
    assert np.abs(np.asarray(g) - by_path[path]).max() < TOLERANCE * scale, path


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('size', [2, 4])
def test_specs_are_legal_and_pairs_are_column_and_row(name, size):
  kinds, held = model(name).kinds, shapes(name)
  found = auto_rules.decide(held, size)
  specs = auto_rules.specs(held, size)
  assert list(found) == list(held) == list(specs)
  for path, (kind, dim) in found.items():
    where = [d for d, a in enumerate(specs[path]) if a == 'tensor']
    assert where == ([] if dim is None else [dim])
    assert dim is None or held[path].shape[dim] % size == 0
    assert not (path.startswith('layers/') and dim == 0)
    assert (kind == auto_rules.VECTOR) == (kinds[path] == 'vector')
  mlp = {p.split('/')[-1]: found[p].kind for p in held if '/mlp/' in p}
  assert mlp.pop('down') == auto_rules.ROW
  assert {v for k, v in mlp.items() if 'bias' not in k} == {auto_rules.COLUMN}
  assert found['layers/attention/query'].kind == auto_rules.COLUMN
  assert found['layers/attention/output'].kind == auto_rules.ROW


@pytest.mark.parametrize('name', FAMILIES)
def test_matrices_are_laid_out_as_megatron_does(name):
  """But for learned positions: their rows are split as Redco splits them."""
  made = model(name)
  ours = auto_rules.specs(shapes(name), 2)
  hand = claims_auto_rules._megatron(made, 2)
  differ = {p for p in ours if tuple(ours[p]) != tuple(hand[p])}
  matrices = {p for p in differ if made.kinds[p] != 'vector'}
  assert matrices == ({'positions'} if name == 'gpt2' else set())
  # What Megatron splits and Redco does not: vectors that follow a column.
  for path in differ - matrices:
    assert tuple(ours[path]) == (None,) * len(ours[path])
    assert 'tensor' in tuple(hand[path])


@pytest.mark.parametrize('name', FAMILIES)
def test_as_a_table_of_logical_axes(name):
  found = auto_rules.table(shapes(name), model(name).axes, 2)
  split = {'heads', 'kv_heads', 'mlp', 'vocab'}
  split |= {'positions'} if name == 'gpt2' else set()
  assert {a for a, axes in found.items() if axes} == split
  assert {found[a] for a in split} == {('tensor',)}


def test_the_table_drives_the_annotated_model():
  """On Explicit axes the same layout comes from the logical table."""
  made, params = model('gpt2'), parameters('gpt2')
  batch = rules_lib.PRESETS['data'].table
  table = auto_rules.table(shapes('gpt2'), made.axes, 2)
  rules = rules_lib.Rules('redco', batch | table)
  mesh = mesh_lib.make('data=2,tensor=2', jax.devices()[:4])
  with annotate.use(rules), jax.set_mesh(mesh):
    specs = {p: annotate.spec(made.axes[p]) for p in params}
    args = jax.device_put(params, specs)
    spec = lambda x: annotate.spec(('batch', 'length')[: np.ndim(x)])
    data = trial.batches(config('gpt2'), False)[0]
    data = jax.device_put(data, jax.tree.map(spec, data))
    step = jax.value_and_grad(lambda p, b: loss.next_token(made, p, b))
    value, grads = jax.jit(step)(args, data)
  check('gpt2', value, grads)


@pytest.mark.parametrize(
  'name, size', [('llama', 4), ('olmo2', 2), ('gpt2', 2)]
)
def test_specs_alone_give_one_devices_numbers(name, size):
  _, mesh, specs = program(name, size)
  value, grads = run(name, size, parameters(name))
  check(name, value, grads)
  for path, g in grads.items():
    layout = jax.NamedSharding(mesh, specs[path])
    assert g.sharding.is_equivalent_to(layout, g.ndim)


def test_other_parameters_are_seen():
  """The negative: the comparison can fail."""
  path = 'layers/attention/query'
  params = parameters('llama') | {path: parameters('llama')[path][..., ::-1]}
  value, grads = run('llama', 4, params)
  with pytest.raises(AssertionError):
    check('llama', value, grads)


def test_fewer_kv_heads_than_shards():
  """Then k and v take their other side, which is no table of logical axes."""
  found = auto_rules.decide(shapes('llama'), 4)
  for name in ('key', 'value'):
    assert found[f'layers/attention/{name}'] == (auto_rules.ROW, 1)
  with support.refused("'embed' is split in layers/at"):
    auto_rules.table(shapes('llama'), model('llama').axes, 4)


def test_names_of_other_trees():
  """Flax Linen's kernels, GPT-2's and T5's names; unknown ones alternate."""
  kinds = lambda **held: [d.kind for d in auto_rules.decide(held, 2).values()]
  column, row = auto_rules.COLUMN, auto_rules.ROW
  layer = {
    f'h/{i}/{name}/kernel': shape
    for i in range(3)
    for name, shape in {
      'attn/c_attn': (8, 24), 'attn/c_proj': (8, 8), 'attn/c_proj2': (8, 8),
      'mlp/c_fc': (8, 32), 'mlp/c_proj': (32, 8),
    }.items()
  }  # fmt: skip
  # The same matrix of every layer has the same side.
  assert kinds(**layer) == [column, row, column, row, column] * 3
  t5 = {
    'encoder/layers/0/self_attention/q/kernel': (8, 8),
    'encoder/layers/0/self_attention/out/kernel': (8, 8),
    'encoder/layers/0/mlp/wi_0/kernel': (8, 16),
    'encoder/layers/0/mlp/wo/kernel': (16, 8),
    'encoder/layers/0/mlp/fc_in/kernel': (8, 16),
    'encoder/layers/0/mlp/fc_out/kernel': (16, 8),
    'encoder/layers/0/norm/scale': (8,),
    'lm_head/kernel': (8, 32),
    'token_embedding': (32, 8),
  }
  assert kinds(**t5) == [
    column, row, column, row, column, row, 'vector', column, 'table',
  ]  # fmt: skip


def test_the_depth_is_never_split():
  stacked = auto_rules.decide({'layers/mlp/up': (4, 6, 8)}, 4)
  single = auto_rules.decide({'layers/3/mlp/up': (6, 8)}, 4)
  assert (
    stacked['layers/mlp/up'].dim == 2 and single['layers/3/mlp/up'].dim == 1
  )


def test_what_no_side_divides_is_refused():
  with support.refused('neither 7 nor 6;', 'do are 3'):
    auto_rules.decide({'mlp/up': (6, 7)}, 4)


# Every mixer, and experts; sizes that 4 divides.
KINDS = {letter: dict(pattern=letter) for letter in 'FWKNAGMSRLVUDC'} | dict(
  gated=dict(attention_gate=True),
  few=dict(num_kv_heads=2),
  one=dict(num_kv_heads=1),
  queries=dict(pattern='A', latent=mixers.Latent(query_rank=6, rank=10)),
  convolved=dict(pattern='G', gated_linear=mixers.GatedLinear(conv_width=3)),
  normed=dict(pattern='S', mamba=mixers.Mamba(inner_norm=True)),
  shared=dict(
    pattern='D', gated_delta=mixers.GatedDelta(heads=4, value_heads=8)
  ),
  narrow=dict(pattern='C', tcn=mixers.Tcn(value_expand=1.0)),
  hybrid=dict(pattern='M-M*', num_layers=4),
  olmo2=FAMILIES['olmo2'],
  experts=dict(experts=Experts(count=8, d_ff=12)),
  dropped=dict(experts=Experts(count=8, capacity_factor=1.5, hot=2)),
  beside=dict(experts=Experts(count=8, shared=1, shared_gate=True)),
  pyramid=dict(experts=Experts(count=8, residual=True, pattern='EP')),
)  # fmt: skip
# Logical axes that are split; models name them, rules do not know them.
SPLIT = {'heads', 'kv_heads', 'mlp', 'vocab', 'experts'}


def of_kind(fields):
  sizes = dict(
    num_heads=8, num_kv_heads=4, window=5, attention_chunk=5, dtype='float32',
    param_dtype='float32', mamba=mixers.Mamba(head_dim=4, state=6),
    recurrent=mixers.Recurrent(heads=4),
  )  # fmt: skip
  return schema.Model(**FIELDS | sizes | fields)


@pytest.mark.parametrize('name', KINDS)
def test_the_program_has_the_axes_that_every_model_names(name):
  config = of_kind(KINDS[name])
  held, axes, found = build.program_axes_of(config)
  for path, spec in auto_rules.specs(held, 4, found).items():
    cut = [d for d, a in enumerate(axes[path]) if a in SPLIT]
    if config.num_kv_heads < 4:  # every shard has them all
      cut = [d for d in cut if axes[path][d] != 'kv_heads']
    assert [d for d, a in enumerate(spec) if a] == cut, path
  auto_rules.table(held, axes, 4, found)  # which is a table


def test_the_alphabet_does_not_know_them():
  """The negative: by names alone matrices of recurrences differ."""
  held, axes, _ = build.program_axes_of(of_kind(KINDS['G']))
  by_name = auto_rules.specs(held, 4)
  names = ('decay_down', 'decay_up', 'query')
  for path in (f'layers/gated_linear/{name}' for name in names):
    cut = [d for d, a in enumerate(axes[path]) if a in SPLIT]
    assert [d for d, a in enumerate(by_name[path]) if a] != cut


@pytest.mark.parametrize(
  'fields, size, words',
  [
    (dict(num_heads=6, num_kv_heads=6), 4,
     ['layers/attention/key of shape (2, 16, 6, 8)', 'by its 6',
      'tensor=4', 'nearest that does is 3']),
    (dict(pattern='R', recurrent=mixers.Recurrent(heads=2)), 4,
     ['by its 2', 'tensor=4', 'is 2.']),
    (dict(experts=Experts(count=6)), 4, ['layers/moe/', 'by its 6', 'is 3.']),
    (dict(vocab_size=50), 4, ['embedding of shape (50, 16)', 'by its 50']),
  ],
)  # fmt: skip
def test_what_the_mesh_does_not_divide_is_refused(fields, size, words):
  held, axes, found = build.program_axes_of(of_kind(fields))
  with support.refused('mesh.rules=auto', *words):
    auto_rules.table(held, axes, size, found)


def test_what_no_layer_computes_in_parts_is_refused():
  held, axes, found = build.program_axes_of(of_kind({}))
  wrong = axes | {p: ('layers', 'embed', None) for p in axes if 'mlp/' in p}
  wrong['layers/mlp/down'] = ('layers', None, 'embed')
  with support.refused('(2, 24, 16)', 'dimension 1 (None)', 'no layer'):
    auto_rules.table(held, wrong, 4, found)
