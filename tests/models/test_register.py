"""A mixer of a user's own file: one call, and every command knows it."""

import dataclasses
import os
import subprocess
import sys
import types

import jax
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.models import checks
from paraxis.models import layer
from paraxis.models import register
from paraxis.models.mixers import attention
from paraxis.models.mixers import latent
from paraxis.models.mixers import protocol
from paraxis.train import cli
from paraxis.train.certify import check
from paraxis.train.certify import verify


def _config(file, **changes):
  config = command_line.load(str(file))
  config.update_from_flattened_dict(changes)
  return schema.view(config)


def test_it_shrinks_and_is_on_a_mesh_what_it_is_on_one_device(own_file):
  config = _config(own_file(), **{'extra.decay': 0.25})
  case = verify.prepare(config, 'context=2,tensor=2,data=2')
  assert case.config.extra.ema.taps == 3 and case.config.extra.decay == 0.25
  assert 'extra.ema.taps 9 -> 3' in case.notes
  rows = verify.certify(case, ('loss', 'gradients', 'update', 'packing'))
  assert len(rows) == 4 and all(row.passed for row in rows), rows


@pytest.mark.parametrize(
  'mesh, changes',
  [
    ('stage=2,tensor=2', {'pipeline.schedule': 'zero_bubble'}),
    ('tensor=2', {'mesh.collectives': 'explicit'}),
  ],
)
def test_it_is_that_within_a_manual_region(mesh, changes, own_file):
  """There a shard holds its channels alone, and takes its part of the taps."""
  case = verify.prepare(_config(own_file(), **changes), mesh)
  rows = verify.certify(case, ('loss', 'gradients'))
  assert len(rows) == 2 and all(row.passed for row in rows), rows


def test_an_edited_file_is_compared_with_itself(own_file):
  """As in a notebook: one device does not keep the mixer of before."""
  for new in ('weights[:, None]', '2 * weights[:, None]'):
    config = _config(own_file('weights[:, None]', new))
    rows = verify.certify(verify.prepare(config, 'data=2'), ('loss',))
    assert all(row.passed for row in rows), rows


def test_one_that_reads_beyond_its_document_is_found(own_file):
  """The test above can fail: an average over the whole row."""
  wrong = own_file(
    "return y_BTD, None",
    'y_BTD = y_BTD + h_BTF.mean() * 0.01\n    return y_BTD, None',
  )  # fmt: skip
  case = verify.prepare(_config(wrong), 'data=2')
  (row,) = verify.certify(case, ('packing',))
  assert not row.passed


def test_check_counts_its_parameters(own_file):
  config = _config(own_file())
  wide = config.model.d_model
  plain = dataclasses.replace(config.model, pattern='F', num_layers=1)
  mixed = dataclasses.replace(config.model, pattern='QF')
  one = dataclasses.replace(config, model=plain)
  two = dataclasses.replace(config, model=mixed)
  mlp_and_norms = 3 * wide * config.model.d_ff + 2 * wide
  more = check.parameters(two) - check.parameters(one)
  assert more == 2 * wide**2 + mlp_and_norms


TAPS = 'min(model.extra.ema.taps, 3)'
INPUT = "parameter.matrix(rngs, (d, d), ('embed', 'mlp'))"
LAST = 'return y_BTD, None if state is None else tail, aux.NOTHING'


@pytest.mark.parametrize(
  'command, old, new, words',
  [
    ('check', 'self.config.extra.ema.taps', 'self.config.extra.ema.tap',
     "AttributeError: 'Extra' object has no attribute 'tap'"),
    ('verify', "'BTD,DF->BTF'", "'BTD,DE->BTF'", 'mine.py:46: '),
    ('verify', 'weights[:, None]', 'weights[None]', 'mine.py:52: '),
    ('check', 'aux.NOTHING', 'aux.NOTHIN', 'mine.py:58: AttributeError'),
    ('check', LAST, 'return y_BTD', 'not (y, state, aux.Aux)'),
    ('check', LAST, 'return y_BTD[:, 1:], state, aux.NOTHING',
     'both are to be equal'),
    ('check', LAST, 'return y_BTD, state, None', 'returns NoneType as the'),
    ('check', 'aux.NOTHING', "aux.Aux({'own': jnp.ones(())}, {}, {})",
     "returns 'own' (), not (parts,)"),
    ('check', 'aux.NOTHING', "aux.of_loss(jnp.ones(1))", "aux has 'nats' of"),
    ('check', 'aux.NOTHING', "aux.Aux({}, {}, {'own': jnp.ones(1)})",
     'counts own: experts alone'),
    ('check', INPUT, '__import__("flax.nnx").nnx.Linear(d, d, rngs=rngs)',
     'parameter ema/input/bias is Param (16,) without logical axes'),
    ('check', INPUT, '__import__("flax.nnx").nnx.Dropout(0.1, rngs=rngs)',
     'without logical axes: layers hold what paraxis.models.parameter makes'),
    ('check', INPUT, INPUT.replace('mlp', 'state'),
     "parameter ema/input: 'state' is no logical axis; there are replicas, "),
    ('check', INPUT, INPUT.replace('mlp', "mlp', 'heads"),
     "input: 3 axes ('embed', 'mlp', 'heads') for the 2 dimensions of (16, 16"),
    ('verify', INPUT, INPUT.replace("'mlp'", ''), '1 axes'),
    ('verify', f'taps={TAPS}', 'tap=3', "gives {'tap': 3}"),
    ('verify', TAPS, '0.5', 'must be int, got float 0.5'),
    ('verify', TAPS, 'model.extra.emma', "no attribute 'emma'"),
  ],
)  # fmt: skip
def test_a_wrong_line_is_named(command, old, new, words, own_file, capsys):
  argv = [command, f'--config={own_file(old, new)}', '--mesh=data=2']
  code, shown = cli.main(argv), capsys.readouterr().err
  assert code == errors.EXIT_USER and shown.count('\n') == 1, shown
  assert words in shown and shown.startswith('paraxis: '), shown
  if 'Error: ' in shown:
    assert 'mine.py:' in shown


PRODUCT = """(h_BTF,) = self._project(
      x_BTD, protocol.RESIDUAL, 'BTD,DF->BTF', ['input'], protocol.WIDE
    )"""


def test_adapters_that_no_product_reads_are_refused(own_file, capsys):
  """Else they are counted as learned, and have no gradient."""
  argv = ['check', '--mesh=data=2', '--config.train.lora.rank=2']
  assert cli.main([*argv, f'--config={own_file()}']) == 0
  capsys.readouterr()
  einsum = "h_BTF = jnp.einsum('btd,df->btf', x_BTD, self.input[...])"
  argv += [f'--config={own_file(PRODUCT, einsum)}']
  assert cli.main(argv) == errors.EXIT_USER
  shown = capsys.readouterr().err
  assert 'matrix input of Ema is not read' in shown, shown
  assert cli.main([*argv, '--config.train.lora.targets=layers/ema/output']) == 0


def test_a_line_of_ours_is_still_a_crash(own_file, capsys, monkeypatch):
  def broken(*args):
    raise ZeroDivisionError('ours')

  monkeypatch.setattr(check, 'text', broken)
  assert cli.main(['check', f'--config={own_file()}']) == errors.EXIT_CRASH
  assert 'ZeroDivisionError: ours' in capsys.readouterr().err


class Good(protocol.Mixer):
  name, capabilities = 'good', protocol.RECURRENT
  __call__ = init_state = mixing_flops = lambda *args: None


def _with(**fields):
  return type('Odd', (Good,), fields)


Lacks = type('Lacks', (protocol.Mixer,), dict(name='lacks'))


class Attends(attention.Attention):
  name = 'attends'


class Compresses(latent.LatentAttention):
  name = 'compresses'


def test_a_class_that_extends_attention_is_of_the_kind_it_names(own_file):
  """Its positions and window, and what may be asked of its layers."""
  with support.refused('W (sliding window)', 'N (full', "like='F'"):
    register.mixer('Q', Attends)
  with support.refused("like='Q'", 'F, W, K, N, A'):
    register.mixer('Q', Attends, like='Q')
  register.mixer('Q', Attends, like='W')
  small = dict(d_model=8, num_heads=2, window=3, attention_chunk=5)
  model = schema.Model(pattern='Q', dtype='float64', **small)
  see = module_cases.see_of([[8]], 8)
  x = np.random.default_rng(1).normal(size=(1, 8, 8))

  def y(letter):
    run, values = module_cases.module(layer.MIXERS[letter], model, letter, 0.5)
    return np.asarray(run(values, x, see)[0])

  with jax.enable_x64(True):
    np.testing.assert_array_equal(y('Q'), y('W'))
    assert all(np.abs(y('Q') - y(other)).max() > 0.01 for other in 'FKN')
  whole = dataclasses.replace(model, visibility='full')
  with support.refused('layers of kind Q', 'behind a token'):
    checks.check_fields(whole)
  register.mixer('B', type('Full', (Attends,), dict(name='full')), like='N')
  checks.check_fields(dataclasses.replace(whole, pattern='B'))


def test_a_class_that_extends_a_mixer_of_one_kind_is_like_it(own_file):
  register.mixer('Q', Compresses)
  assert mixers.TABLE['Q'].rotary and mixers.TABLE['Q'].scales_scores
  small = dict(d_model=64, num_heads=4, d_ff=64, vocab_size=320)
  config = schema.Config(
    model=schema.Model(pattern='Q', num_layers=2, **small),
    data=schema.Data(tokenizer='bytes', sequence_length=64),
  )
  case = verify.prepare(config, 'context=2,tensor=2')
  assert 'model.latent.rank 128 -> 16' in case.notes
  rows = verify.certify(case, ('loss',))
  assert len(rows) == 1 and all(row.passed for row in rows), rows


@pytest.mark.parametrize(
  'arguments, words',
  [
    (('F', Good), 'F is full attention already; free are B, E, I'),
    (('q', Good), 'one capital'),
    (('QQ', Good), 'one capital'),
    (('Ä', Good), 'one capital'),
    ((1, Good), 'one capital'),
    (('Q', protocol), 'no subclass of paraxis.models.mixers.protocol.Mixer'),
    (('Q', Lacks), 'lacks __call__, init_state, mixing_flops, capabilities'),
    (('Q', _with(name='attention')), "'attention' is taken"),
    (('Q', _with(name='mlp')), "'mlp' is taken"),
    (('Q', _with(name='a/b')), 'lower-case letters'),
    (('Q', _with(name='lambda')), 'no keyword of Python'),
    (('Q', _with(capabilities=protocol.SLOTS)), 'its own decode and commit'),
    (('Q', Good, dict(x=1)), 'a frozen dataclass'),
    (('Q', Good, None, len), 'fields of the section'),
    (('Q', Good, dataclasses.make_dataclass('S', [('x', int)])),
     'the default of extra.good.x is nothing'),
  ],
)  # fmt: skip
def test_what_cannot_be_registered_is_one_line(arguments, words, own_file):
  before = dict(mixers.TABLE), dict(layer.MIXERS)
  with support.refused(words):
    register.mixer(*arguments)
  assert (mixers.TABLE, layer.MIXERS) == before


def test_a_letter_of_another_file_is_taken(own_file, tmp_path):
  command_line.load(str(own_file()))
  command_line.load(str(own_file()))  # the same file again
  other = tmp_path / 'other.py'
  other.write_text(own_file().read_text())
  with support.refused('Q is Ema already, of'):
    command_line.load(str(other))


def test_a_checkpoint_asks_for_the_file_and_compares_it(own_file):
  saved = dict(Q=dict(file='mine.py', sha256='0' * 64))
  with support.refused('no checkpoint brings code', '--config=mine.py'):
    register.require(saved, 'RUN')
  file = own_file()
  command_line.load(str(file))
  described = register.described('Q-F')
  assert described['Q']['file'] == 'mine.py'
  assert not register.described('F') and not register.require(None, 'RUN')
  register.require(described, 'RUN')
  with support.refused('as it was', '--init_from=RUN', '000000000000'):
    register.require(saved, 'RUN')
  said = []
  register.require(saved, 'RUN', said.append)
  assert len(said) == 1 and 'may be others' in said[0]
  file.write_text(file.read_text() + '# a change\n')
  command_line.load(str(file))
  assert register.described('Q-F') != described


CELL = """
import functools

__name__ = 'cell'
from paraxis.models import register
from paraxis.models.mixers import protocol


def half(x, by=2):
  return x / by if by in {'a', 'b', 'c', 2} else x


class Good(protocol.Mixer):
  name, capabilities, scale = 'good', protocol.RECURRENT, 3.0

  def __call__(self, x, see, state=None):
    turn = lambda y: self.turned(y) + self.last
    return half(turn(x)), state, super().other

  @staticmethod
  def turned(y):
    return -y

  @property
  def first(self):
    return 1

  @functools.cached_property
  def last(self):
    return self.first

  init_state = mixing_flops = lambda *given: Good


register.mixer('Q', Good)
print(register.described('Q')['Q']['sha256'])
"""


def test_a_class_of_a_cell_is_known_by_its_code(own_file):
  """Without a file; whatever the order of sets, and where in the cell it is."""

  def sha256(old='', new=''):
    assert old in CELL
    exec(CELL.replace(old, new, 1) if old else CELL, {})  # noqa: S102
    return register.described('Q')['Q']['sha256']

  first = sha256()
  assert sha256('def half', '\n\nLINES = 3\ndef half') == first
  done = subprocess.run(
    [sys.executable, '-c', CELL], env=os.environ | dict(PYTHONHASHSEED='1'),
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  assert done.stdout.split() == [first]
  changes = [
    ('x / by', 'x * by'), ('by=2', 'by=3'), ("'c'", "'d'"), ('-y', '+y'),
    ('return 1', 'return 2'), ('3.0', '4.0'), ('+ self', '- self'),
    ('self.first', 'self.turned'), ('state=None', 'state=0'),
  ]  # fmt: skip
  found = {sha256(*change) for change in changes}
  assert len(found) == len(changes) and first not in found
  with support.refused('its mixer Q is from no file of sha256', 'as it was'):
    register.require(dict(Q=dict(file='', sha256=first)), 'RUN')


def test_answers_are_those_of_the_protocol():
  """The check itself, on what is no tuple."""
  mixer = types.SimpleNamespace(kind='Q')
  with support.refused('returns int'):
    layer._check_answer(mixer, None, 3)
