"""`paraxis decode --certify`: what it proves, prints and refuses; each of its
properties fails where what it is about is broken."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.decode import __main__ as command
from paraxis.decode import cache as cache_lib
from paraxis.decode import judges
from paraxis.decode import load
from paraxis.decode import methods
from paraxis.decode.certify import cases
from paraxis.decode.certify import properties
from paraxis.decode.certify import table
from paraxis.decode.drafts import drafters
from paraxis.models import layer
from paraxis.models.mixers import attention
from paraxis.models.mixers import gated_linear
from paraxis.models.mixers import latent
from paraxis.models.mixers import protocol

CORE = dict(prelude=1, core=1, iterations=3)
ONE_DEVICE = (
  properties.cached, properties.tree, properties.rolled_back,
  properties.given_away, properties.declared,
)  # fmt: skip


def proven(pattern, *proofs, changes=()):
  """Rows of some properties of a small model, which compiles all anew."""
  case = cases.small(pattern, dict(changes))
  with jax.enable_x64(True):
    proof = properties.Proof(case)
    return [row for prove in proofs for row in prove(proof)]


def test_the_command_proves_a_pattern(capsys):
  """Every property, by the program that users start."""
  assert command_line.run(command.main, ['--certify=F', '--json']) == 0
  found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
  assert found['passed'] and found['dtype'] == 'float64'
  assert found['devices'] == 8
  rows = {row['name']: row for row in found['rows']}
  assert len(rows) == len(found['rows']) >= 13
  assert all(row['measured'] < 1e-12 for row in found['rows'][:-2])
  assert all(row['word'] == 'PASS' for row in found['rows'])
  for mesh in ('tensor=4', 'data=2,tensor=2', 'context=4'):
    assert rows[f'{mesh} = one device']['measured'] > 0
  assert rows['greedy prompt_lookup = one by one']['worst'] > '1.0 a call'
  assert found['rows'][-1]['name'].startswith('judge rejection: ')


def test_a_core_that_runs_several_times_holds():
  """A state of every pass; what drafts with the first layers is refused."""
  core = {f'model.recurrence.{k}': n for k, n in CORE.items()}
  changes = core | {'model.num_layers': 3}
  found = proven('F', *ONE_DEVICE, properties.methods, changes=changes)
  assert {row.name for row in found if row.word != 'PASS'} == {
    f'greedy {name} = one by one' for name in methods.OF_LAYERS
  }
  assert all(row.measured < 1e-12 for row in found if row.measured is not None)


def test_a_hybrid_holds_on_one_device():
  rows = proven('GF', *ONE_DEVICE)
  assert [row.word for row in rows] == ['PASS'] * 5, rows
  assert 'no tree: G has one state' in rows[1].name
  assert all(0 < row.measured < 1e-12 for row in rows[:4])


@pytest.mark.sampled(18)
@pytest.mark.parametrize('pattern', cases.patterns())
def test_every_kind_holds(pattern):
  """Their methods: test_methods.py."""
  proofs = [p for p in properties.PROPERTIES if p is not properties.methods]
  rows = proven(pattern, *proofs)
  refused = [row.name for row in rows if row.word == properties.REFUSED]
  assert all(row.passed for row in rows), rows
  slots = any(layer.MIXERS[kind].capabilities.slots for kind in pattern)
  assert any('context' in name for name in refused) != slots
  assert max(row.measured for row in rows) < 1e-11


def test_every_mixer_is_in_a_model():
  assert set(''.join(cases.patterns())) == set(layer.MIXERS)
  assert max(map(len, cases.patterns())) == 2


# --------------------------------------------------------------- what is broken


def test_a_key_that_is_not_kept_is_found(monkeypatch):
  """The mixer declares that its steps are exact, and drops a committed key."""
  commit = attention.Attention.commit

  def drop(self, state, flight, plan, keep):
    return commit(self, state, flight, plan, keep & (plan.ids.position != 2))

  monkeypatch.setattr(attention.Attention, 'commit', drop)
  monkeypatch.setattr(properties, 'PROPERTIES', (properties.cached,))
  monkeypatch.setattr(properties, 'judged', lambda: [])
  lines = []
  code = table.run(('F',), cases.small, say=lines.append)
  assert code == errors.EXIT_DIFFERENT
  assert lines[3].startswith('FAIL  cached = uncached')
  assert lines[-1] == '1 of 1 properties DIFFER'


INEXACT = {'model.latent.groups': 2, 'model.latent.scores': 'own'}


def test_what_a_mixer_declares_of_its_steps(monkeypatch):
  """A softmax in each latent shard: told, and told as a lie."""
  monkeypatch.setattr(properties, 'MESHES', ('data=2,tensor=2', 'tensor=4'))
  proofs = properties.cached, properties.sharded
  row, mesh, refused = proven('A', *proofs, changes=INEXACT)
  assert mesh.word == 'PASS'  # one device steps as the mesh does
  assert refused.word == properties.REFUSED and 'groups=2' in refused.why
  assert row.word == properties.CHANGES and not row.passed
  assert row.measured > 1e-3 and 'layer 0 (kind A) declares exact=F' in row.why
  text = table.line(row)
  assert text.startswith(properties.CHANGES) and 'off by' in text
  made = latent.LatentAttention.__init__

  def lie(self, *args):
    made(self, *args)
    self.capabilities = protocol.SLOTS

  monkeypatch.setattr(latent.LatentAttention, '__init__', lie)
  (row,) = proven('A', properties.cached, changes=INEXACT)
  assert row.word == 'FAIL'


@pytest.mark.parametrize(
  'cls, pattern, slots',
  [(gated_linear.GatedLinear, 'FG', True), (attention.Attention, 'FG', False)],
)
def test_what_a_mixer_declares_of_its_slots(cls, pattern, slots, monkeypatch):
  says = protocol.Capabilities(slots=slots)
  monkeypatch.setattr(cls, 'capabilities', says)
  (row,) = proven(pattern, properties.declared)
  assert row.word == 'FAIL' and row.measured == 1
  assert row.worst == f'layer {int(slots)} (kind {"FG"[slots]}) declares ' + (
    f'slots={slots}'
  )


def test_a_model_that_is_not_finite_is_no_reference():
  case = cases.small('F')
  values = case.values | {'norm/scale': np.full(16, np.nan)}
  with jax.enable_x64(True), pytest.raises(errors.IntegrityError, match='F: '):
    cases.Engine(case._replace(values=values)).uncached([(1, 2)])


def test_a_branch_that_sees_its_neighbours_is_found(monkeypatch):
  fields = cases.Tree.fields

  def all_seen(self, first):
    return fields(self, first) | dict(ancestors=[0xFFFFFFFF] * 8)

  monkeypatch.setattr(cases.Tree, 'fields', all_seen)
  (row,) = proven('F', properties.tree)
  assert row.word == 'FAIL' and row.measured > 1e-3


def test_a_state_that_is_not_rolled_back_is_found(monkeypatch):
  """Nor cleared: of kind C, whose values a new request gives a weight of 0."""

  def lengths(model, cache, length_R, before=None):
    del model, before
    return cache._replace(length=jnp.minimum(cache.length, length_R))

  def none(model, cache, rows_R):
    del model
    return cache._replace(length=jnp.where(rows_R, 0, cache.length))

  monkeypatch.setattr(cache_lib, 'rollback', lengths)
  monkeypatch.setattr(cache_lib, 'evict', none)
  (row,) = proven('G', properties.rolled_back)
  assert row.word == 'FAIL'
  (row,) = proven('C', properties.given_away)
  assert row.word == 'FAIL'
  assert row.measured == float('inf')  # NaN of the one before


def test_a_shard_that_reads_other_heads_is_found(monkeypatch):
  repeat = protocol.repeat_heads

  def turned(x, heads, names=protocol.HEADS):
    return jnp.roll(repeat(x, heads, names), 1, names.index('head_dim'))

  monkeypatch.setattr(properties, 'MESHES', ('tensor=4',))
  monkeypatch.setattr(protocol, 'repeat_heads', turned)
  rows = proven('F', properties.declared, properties.sharded)
  assert [row.word for row in rows] == ['PASS', 'FAIL']


def one_more(z, drafts, draws, tree):
  """Keeps one more draft than the draws agree with."""
  tokens, n, at = judges.replay(z, drafts, draws, tree)
  more = jnp.minimum(n + 1, drafts.valid.sum(1, dtype=jnp.int32))
  kept = jnp.concatenate([drafts.tokens, tokens[:, -1:]], 1)
  place = jnp.arange(tokens.shape[1])
  tokens = jnp.where(place < more[:, None], kept, tokens)
  return judges.Judged(tokens, more, at)


def test_a_judge_that_keeps_too_much_is_found(monkeypatch):
  liar = judges.Judge(True, True, one_more)
  monkeypatch.setitem(judges.JUDGES, 'replay', liar)
  monkeypatch.setattr(
    properties, 'METHODS', {'autoregressive': (), 'prompt_lookup': ()}
  )
  rows = proven('F', properties.methods)
  assert [row.word for row in rows] == ['PASS', 'FAIL']
  assert rows[1].measured >= 1 and rows[1].worst.startswith('row ')


def test_a_method_of_which_no_draft_is_kept_is_said(monkeypatch):
  def none(z, drafts, draws, tree):
    none = drafts._replace(valid=drafts.valid & False)
    return judges.replay(z, none, draws, tree)

  lookup = {'autoregressive': (), 'prompt_lookup': ()}
  monkeypatch.setattr(properties, 'METHODS', lookup)
  said = lambda: proven('F', properties.methods)[1].worst
  assert said().endswith(' a call')
  monkeypatch.setitem(judges.JUDGES, 'replay', judges.Judge(True, True, none))
  assert said() == 'no draft kept'


def test_layers_draft_side_by_side_where_there_are_enough(monkeypatch):
  """Else the drafts of EasySpec are exact."""
  easy = {'autoregressive': (), 'easyspec': ()}
  monkeypatch.setattr(properties, 'METHODS', easy)
  groups, real = [], drafters.EasySpec.__init__

  def made(self, draft, width, together, coupled):
    groups.append((draft.model.config.num_layers, together))
    real(self, draft, width, together, coupled)

  monkeypatch.setattr(drafters.EasySpec, '__init__', made)
  for layers, group in ((2, 1), (3, 2)):
    row = proven('F', properties.methods, changes={'model.num_layers': layers})
    assert row[1].word == 'PASS' and groups == [(group, group)]
    groups.clear()


def test_a_judge_of_another_distribution_is_found(monkeypatch):
  other = functools.partial(judges.rejection, rest=lambda p, q: p)
  monkeypatch.setitem(
    judges.JUDGES, 'rejection', judges.Judge(True, False, other)
  )
  honest = judges.Judge(False, True, judges.replay)  # it claims nothing: no row
  monkeypatch.setitem(judges.JUDGES, 'replay', honest)
  with jax.enable_x64(True):
    (row,) = properties.judged()
  assert row.word == 'FAIL' and row.measured > 2 * properties.FAR


# ------------------------------------------------------- tables and checkpoints


class Fake:
  """A proof whose models fail that hold W."""

  def __init__(self, case, mesh_text=''):
    del mesh_text
    self.case = case

  def row(self):
    failed = 'W' in self.case.name
    measured = float('inf') if failed else 2e-16
    word = 'FAIL' if failed else 'PASS'
    yield properties.Row(self.case.name, 'p', 1e-9, measured, 'row 0, 1', word)


def test_a_model_that_fails_is_taken_apart(monkeypatch):
  monkeypatch.setattr(properties, 'Proof', Fake)
  monkeypatch.setattr(properties, 'PROPERTIES', (Fake.row,))
  monkeypatch.setattr(properties, 'judged', lambda: [])
  make = lambda name: cases.Case(name, None, {}, ('a 1 -> 2',))
  lines = []
  assert table.run((), make, as_json=True, say=lines.append) == 1
  (text,) = lines
  found = json.loads(text, parse_constant=pytest.fail)
  names = [row['case'] for row in found['rows']]
  assert names == [*cases.patterns(), 'F', 'W']
  assert [r['case'] for r in found['rows'] if not r['passed']] == ['FW', 'W']
  assert found['rows'][0]['measured'] is None and not found['passed']
  assert found['notes']['GF'] == ['a 1 -> 2']
  lines.clear()
  assert table.run(('W',), make, say=lines.append) == 1
  assert lines[2:4] == ['W: sliding window', 'changed: a 1 -> 2']
  assert lines[4].split() == ['FAIL', 'p', '1e-09', 'inf', 'row', '0,', '1']


def test_lines_fit_a_screen():
  """But for what is furthest off where something fails."""
  row = properties.Row('F', 'n' * 46, 1e-9, 1e-15, 'row 3, 23')
  assert len(table.line(row)) == 80
  refused = row._replace(word=properties.REFUSED, why='many words ' * 20)
  assert max(map(len, table.line(refused).splitlines())) <= 80


def test_a_checkpoint_is_certified_with_its_own_parameters(
  tmp_path, monkeypatch, capsys
):
  tiny = dict(
    vocab_size=2048, d_model=16, num_layers=1, num_heads=2, d_ff=32,
    pattern='W', window=16,
  )  # fmt: skip
  config = schema.view({'model': tiny, 'decode': dict(weights='int4')})
  built, params = support.untrained(config, 3)
  path = support.save_run(tmp_path, config, built, params)
  with load.Checkpoint(path, say=lambda line: None) as checkpoint:
    case = cases.of_checkpoint(checkpoint)
  assert case.name == 'W' and case.config.model.dtype == 'float64'
  for name, x in params.items():
    assert (case.values[name] == x).all() and case.values[name].dtype == 'f8'
  monkeypatch.setattr(properties, 'PROPERTIES', (properties.cached,))
  monkeypatch.setattr(properties, 'judged', lambda: [])
  flags = [f'--checkpoint={path}', '--certify', '--config.model.window=9']
  assert command_line.run(command.main, flags) == 0
  out = capsys.readouterr().out
  assert 'W: sliding window' in out and 'model.window 9 -> 6' in out
  assert 'decode.weights int4 -> loaded' in out.replace('\n', ' ')
  assert 'recurrent' not in out  # which no layer reads
  assert 'PASS  cached = uncached' in out and 'all 1 properties hold' in out


def test_a_run_with_a_side_network_is_refused_as_by_decoding(tmp_path, capsys):
  tiny = dict(vocab_size=2048, d_model=16, num_layers=1, num_heads=2, d_ff=32)
  config = schema.view({'model': tiny, 'train': dict(side=4)})
  built, params = support.untrained(config, 3)
  path = support.save_run(tmp_path, config, built, params)
  said = []
  for flag in ('--certify', '--prompt=a'):
    code = command_line.run(command.main, [f'--checkpoint={path}', flag])
    said.append(capsys.readouterr().err.splitlines()[-1])
    assert code == errors.EXIT_USER and 'train.side=4' in said[-1]
  assert said[0] == said[1]


def test_streams_have_no_forks():
  """One row is refused, and the others go on."""
  changes = {'model.wiring': 'streams', 'model.streams': 2}
  proofs = properties.cached, properties.forked, properties.given_away
  rows = proven('F', *proofs, changes=changes)
  words = [row.word for row in rows]
  assert words == ['PASS', properties.REFUSED, 'PASS'], rows
  assert 'model.streams=2' in rows[1].why


@pytest.mark.parametrize(
  'flags, text',
  [
    (['--certify=FQ'], "'Q' is no mixer"),
    (['--certify=F,'], 'model.pattern is empty'),
    (['--certify=F', '--checkpoint=run'], 'leave out one'),
    (['--certify', '--prompt=x'], 'leave out --prompt'),
    (
      ['--certify', '--method=jacobi', '--temperature=0', '--chat'],
      'leave out --chat, --temperature, --method.',
    ),
    (
      ['--certify', '--checkpoint=run', '--config.decode.weights=int4'],
      'leave out --config.decode.weights.',
    ),
    (['--certify=F', '--step=3', '--ema'], 'leave out --step, --ema.'),
    (['--certify', '--calibration_file=x'], 'out --calibration_file.'),
    (['--certify=F', '--mesh=tenser=2'], "Did you mean 'tensor'"),
    (['--certify=F', '--mesh=tensor=3'], 'tensor=3 does not divide'),
    (['--certify=F', '--mesh=tensor=16'], '16 devices, but 8'),
    (['--certify=G', '--mesh=context=4'], 'layers of kind G have none'),
    (['--certify=F', '--config.model.window=x'], 'window'),
    (['--certify', '--config.model.pattern=Q'], "'Q' is no mixer"),
  ],
)
def test_what_cannot_be_certified(flags, text, capsys):
  assert command_line.run(command.main, flags) == errors.EXIT_USER
  err = capsys.readouterr().err
  assert text in err and err.count('\n') == 1
