"""A mixer is a module, a row of the table, a class line, and nothing else."""

import dataclasses

import jax
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import mixers
from paraxis.decode import cache
from paraxis.models import aux
from paraxis.models import decoder
from paraxis.models import layer
from paraxis.models import parameter
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import recurrence
from paraxis.train.certify import verify

ROW = mixers.MixerKind(
  'toy', 'tcn', lambda model, few: dict(kernel=min(model.tcn.kernel, 3))
)


class Toy(mixer.Mixer):
  """A convolution between two products; its taps are model.tcn.kernel."""

  name = 'toy'
  capabilities = mixer.RECURRENT

  def __init__(self, config, rngs, kind, layout=parameter.PLAIN):
    del kind
    self.config, self.layout, d = config, layout, config.d_model
    self.input = parameter.matrix(rngs, (d, d), ('embed', 'mlp'))
    self.taps = parameter.embedding(
      rngs, (config.tcn.kernel, d), (None, 'mlp'), 0.5
    )
    self.output = parameter.matrix(rngs, (d, d), ('mlp', 'embed'))

  def __call__(self, x_BTD, see, state=None):
    (h,) = parameter.multiply(
      self, x_BTD, mixer.RESIDUAL, [('input', 'BTD,DF->BTF', mixer.WIDE)]
    )
    h, tail = recurrence.conv(
      h, self.taps[...], mixer.WIDE, see, self.layout, state
    )
    (y,) = parameter.multiply(
      self, h, mixer.WIDE, [('output', 'BTF,FD->BTD', mixer.RESIDUAL)]
    )
    return y, None if state is None else tail, aux.NOTHING

  def init_state(self, batch, slots, dtype):
    keep, names = self.config.tcn.kernel - 1, ('batch', None, 'mlp')
    return mixer.state(names, batch, keep, self.config.d_model, dtype=dtype)

  @staticmethod
  def mixing_flops(config, kind, length):
    return 2 * length * config.tcn.kernel * config.d_model


@pytest.fixture
def toy(monkeypatch):
  monkeypatch.setitem(mixers.TABLE, 'Y', ROW)
  monkeypatch.setitem(layer.MIXERS, 'Y', Toy)


def config_of(**fields):
  own = dict(
    vocab_size=32, d_model=16, num_heads=4, d_ff=16, num_layers=2,
    pattern='Y-F', dtype='float64', param_dtype='float64',
    tcn=mixers.Tcn(kernel=9),
  )  # fmt: skip
  return schema.Config(
    model=schema.Model(**own | fields),
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(warmup_steps=0),
  )


@pytest.mark.usefixtures('toy')
def test_a_new_mixer_shrinks_and_trains_on_a_mesh_as_on_one_device():
  subject = verify.prepare(config_of(), 'context=2,tensor=2,data=2')
  assert subject.config.model.tcn == mixers.Tcn(kernel=3)
  assert subject.config.model.pattern == 'Y-F'
  rows = verify.certify(subject, ('loss', 'gradients', 'update'))
  assert len(rows) == 3 and all(row.passed for row in rows), rows


class Alone(Toy):
  """Of each token by itself: it has no state."""

  def __call__(self, x_BTD, see, state=None):
    (h,) = self._project(
      x_BTD, mixer.RESIDUAL, 'BTD,DF->BTF', ['input'], mixer.WIDE
    )
    y = self._output(jax.nn.silu(h), mixer.WIDE, 'BTF,FD->BTD')
    return y, state, aux.NOTHING

  def init_state(self, batch, slots, dtype):
    return ()


@pytest.mark.parametrize('made', [Toy, Alone])
@pytest.mark.usefixtures('toy')
def test_a_new_mixer_decodes(made, monkeypatch):
  monkeypatch.setitem(layer.MIXERS, 'Y', made)
  with jax.enable_x64(True):
    model = decoder.Decoder(config_of().model)
    params = model.init(jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 32, (1, 8), np.int32)
    whole = module_cases.logits(model, params, ids)
    loose = model.unstack(params)
    (start, last), _ = module_cases.decoded(model, loose, ids, [7], 1)
    found = np.concatenate([start, last[:, None]], 1)
    np.testing.assert_allclose(found, whole, rtol=1e-11, atol=1e-11)
    before = model.init_cache(1, 8)  # of drafts, a step of which is kept
    kept = jax.tree.map(lambda x: x[None], cache.recurrent(model, before))
    assert cache.after(model, before, before, kept, np.ones(1)).length == 1


def faults():
  """What any reader of the table lacks."""
  found = []
  if set(mixers.TABLE) != set(layer.MIXERS):
    found.append(f'classes: {set(mixers.TABLE) ^ set(layer.MIXERS)}')
  model = schema.Model()
  doc = model.__dataclass_fields__['pattern'].metadata['doc']
  for letter, kind in mixers.TABLE.items():
    if f'{letter} {kind.word}' not in doc:
      found.append(f'{letter}: not in the documentation of model.pattern')
    if bool(kind.section) != bool(kind.shrink):
      found.append(f'{letter}: a section and a shrink rule go together')
    if kind.shrink:
      own = getattr(model, kind.section)
      few = lambda n, target: min(n, target)
      assert dataclasses.replace(own, **kind.shrink(model, few))
    if kind.rotary and kind.rotary(model) < 1:
      found.append(f'{letter}: rotates no width')
  sections = {f.name for f in dataclasses.fields(mixers.Sections)}
  unread = sections - {kind.section for kind in mixers.TABLE.values()}
  return found + [f'{name}: a section of no mixer' for name in unread]


def test_every_reader_knows_every_letter():
  assert not faults()


@pytest.mark.parametrize(
  'row, known, text',
  [
    (ROW, {}, "classes: {'Y'}"),
    (ROW, {'Y': Toy}, 'Y: not in the documentation'),
    (ROW._replace(shrink=None), {'Y': Toy}, 'a shrink rule go together'),
    (ROW._replace(rotary=lambda model: 0), {'Y': Toy}, 'rotates no width'),
  ],
)  # fmt: skip
def test_a_letter_that_a_reader_lacks_is_found(row, known, text, monkeypatch):
  monkeypatch.setitem(mixers.TABLE, 'Y', row)
  for letter, module in known.items():
    monkeypatch.setitem(layer.MIXERS, letter, module)
  assert text in '\n'.join(faults())


def test_a_section_that_no_mixer_reads_is_found(monkeypatch):
  monkeypatch.delitem(mixers.TABLE, 'C')
  assert 'tcn: a section of no mixer' in faults()
