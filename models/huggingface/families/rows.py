"""Rows of a family's table: a field of config.json and ours, both ways.

A row reads {our dotted field: value} from a reader.Reader, and writes {their
field: value} from a schema.Model. Only readers refuse: what a writer could not
say is found by reading it back (config.py).
"""

import dataclasses
import math
from typing import Any

from paraxis.models.huggingface.families import reader as reader_lib
from paraxis.models.huggingface.families.reader import MISSING


def value(model, name):
  """The value of a dotted field of a schema.Model."""
  for part in name.split('.'):
    model = getattr(model, part)
  return model


@dataclasses.dataclass(frozen=True)
class Same:
  """One field under two names."""

  theirs: str
  ours: str
  default: Any = MISSING
  other: tuple = ()  # further names of it, older ones
  null: Any = MISSING  # ours that is written as null
  zero: bool = False  # 0 is valid, where the default is another

  def read(self, config):
    for name in (*self.other, self.theirs):
      found = config.given(name)
      if found is None:
        continue
      found = config.checked(name, found, self.ours)
      if type(found) is int and not found and not self._may_be_0:
        config.refuse(name, 'is not 1 or more')
      return {self.ours: found}
    if self.default is MISSING and self.other:
      config.refuse(self.theirs, f'is not there, nor {" or ".join(self.other)}')
    return {self.ours: config(self.theirs, self.default)}

  @property
  def _may_be_0(self):
    """Ours may stand for another value by 0; theirs says it by null."""
    usual = self.default is not MISSING and not self.default
    return self.zero or (usual and self.null != 0)

  def write(self, model):
    found = value(model, self.ours)
    return {self.theirs: None if found == self.null else found}


@dataclasses.dataclass(frozen=True)
class Choice:
  """A field whose values have other names; `ours` may be several fields."""

  theirs: str
  ours: Any
  values: dict
  default: Any = MISSING

  def read(self, config):
    given = config.given(self.theirs)
    if given is None:
      given = config(self.theirs, self.default)
    if not any(reader_lib.same(given, known) for known in self.values):
      known = ', '.join(map(repr, self.values))
      config.refuse(self.theirs, f'is not one of {known}, which models here do')
    new = self.values[given]
    return dict(zip(self.ours, new, strict=True)) if self._many else {
      self.ours: new
    }  # fmt: skip

  @property
  def _many(self):
    return not isinstance(self.ours, str)

  def write(self, model):
    names = self.ours if self._many else (self.ours,)
    held = tuple(value(model, name) for name in names)
    for given, new in self.values.items():
      if held == (new if self._many else (new,)):
        return {self.theirs: given}
    return {}


@dataclasses.dataclass(frozen=True)
class Fixed:
  """A field of config.json of which models here do one value only."""

  theirs: str
  only: Any
  default: Any = MISSING  # what a file without it means; here: `only`

  def read(self, config):
    found = config.given(self.theirs)
    if found is None:
      found = self.only if self.default is MISSING else self.default
    if not reader_lib.same(found, self.only):
      config.refuse(
        self.theirs, f'is not what models here do, which is {self.only!r}'
      )
    return {}

  def write(self, model):
    return {self.theirs: self.only}


@dataclasses.dataclass(frozen=True)
class Ours:
  """Fields of ours that the family always has."""

  values: dict

  def read(self, config):
    return dict(self.values)

  def write(self, model):
    return {}


@dataclasses.dataclass(frozen=True)
class Computed:
  """Fields by two functions: Reader -> ours; schema.Model -> theirs."""

  reads: Any
  writes: Any

  def read(self, config):
    return self.reads(config)

  def write(self, model):
    return self.writes(model)


class Fraction(Computed):
  """Share of a head that rotates."""


def unit(letters):
  """The shortest text that, repeated and cut off, is `letters`."""
  border = [0] * len(
    letters
  )  # of each prefix: its longest proper one that ends
  for i in range(1, len(letters)):
    n = border[i - 1]
    while n and letters[i] != letters[n]:
      n = border[n - 1]
    border[i] = n + (letters[i] == letters[n])
  return letters[: len(letters) - border[-1]] if letters else letters


def rope(theta=1e4, base='', **options):
  """Rotary positions: `rope_parameters`, or the older fields of their own.

  theta: of a file that has none. base: an older name of it.
  """
  return Computed(
    lambda config: _read_rope(
      config, config(base, theta, 1) if base else theta, **options
    ),
    lambda model: (
      older_too(written_rope(model, **options), base or OLD_BASE)
      | written_length(model)
    ),
  )


OLD_ROPE, OLD_BASE = 'rope_scaling', 'rope_theta'


def older_too(rope, base=OLD_BASE):
  """Fields of a config.json with these rotary parameters, the older ones too.

  transformers 4 and what was written beside it know no rope_parameters, and
  would rotate by defaults without a word. base: their name of the base.
  """
  scaled = {OLD_ROPE: rope} if rope['rope_type'] != 'default' else {}
  return {'rope_parameters': rope, base: rope.get('rope_theta')} | scaled


def given_rope(config, name='rope_parameters'):
  """Reader of the rotary parameters, which may stand under the older name."""
  old, found = config.inside(OLD_ROPE), config.inside(name)
  if old is not None and old.config:
    if found is not None and found.config != old.config:
      config.refuse(OLD_ROPE, f'and {name} are both there, and differ')
    if found is None:
      return old
    config.pass_over(OLD_ROPE)
  empty = reader_lib.Reader({}, f'{config.path}: {name}')
  return empty if found is None else found


def _read_rope(config, theta, **options):
  rope = given_rope(config)
  return scaling(config, rope, config('rope_theta', theta, 1), **options)


def _kind(rope):
  """rope_type of rotary parameters, by its name of today."""
  kind = rope('rope_type', rope('type', 'default'))
  if rope.given('short_factor') is not None and kind in ('su', 'yarn'):
    return 'longrope'  # Phi-3's earlier names of it
  return kind


def scaled_by(*kinds):
  """Beside `rope`: of classes that know no other scaling."""

  def read(config):
    rope = given_rope(config)
    if (kind := _kind(rope)) not in ('default', *kinds):
      known = ' or '.join(('default', *kinds))
      rope.refuse('rope_type', f'is not {known}, which its class knows', kind)
    return {}

  return Computed(read, lambda model: {})


def scaling(config, rope, theta=1e4, latent=False):
  """Our fields of one object of rotary parameters.

  Args:
    config, rope: Readers of the file, and of the object.
    theta: the base, where the object has none.
    latent: of latent attention, whose scores YaRN corrects, not cos and sin.
  """
  kind = _kind(rope)
  part = rope('partial_rotary_factor', 1.0)
  if part != 1 and not config.partial:
    rope.refuse('partial_rotary_factor', 'rotates a part of a head')
  out = {'rope_theta': rope('rope_theta', float(theta), 1)}
  length = config('max_position_embeddings', 8192)
  length = rope('original_max_position_embeddings', length)
  length = config('original_max_position_embeddings', length)
  if kind == 'default':
    for name in ('factor', 'short_factor'):
      if rope.given(name) not in (None, 1):
        rope.refuse('rope_type', f'has no {name}, and there is one', kind)
    return out
  if kind == 'longrope':
    return out | _longrope(config, rope, length)
  if kind not in ('linear', 'llama3', 'yarn'):
    rope.refuse('rope_type', 'is not linear, llama3, yarn or longrope', kind)
  out |= {'rope_scaling': kind, 'rope_factor': _factor(rope)}
  if kind == 'linear':
    return out
  out['rope_original_length'] = length
  if kind == 'llama3':
    out['rope_low_frequency'] = _needed(rope, 'low_freq_factor')
    out['rope_high_frequency'] = _needed(rope, 'high_freq_factor')
  if kind == 'yarn':
    out['rope_low_frequency'] = rope('beta_slow', 1.0)
    out['rope_high_frequency'] = rope('beta_fast', 32.0)
    out['rope_truncate'] = rope('truncate', True)
    scale = _latent_mscale if latent else _mscale
    out['rope_mscale'] = scale(rope, out['rope_factor'])
  return out


def _longrope(config, rope, length):
  """Two lists of divisors, and what multiplies cos and sin.

  length: tokens of context before the extension.
  """
  most = config('max_position_embeddings', length)
  factor = rope('factor', most / length, 1)
  usual = 1.0
  if factor > 1:
    usual = math.sqrt(1 + math.log(factor) / math.log(max(length, 2)))
  lists = {}
  for name in ('short_factor', 'long_factor'):
    found = rope.numbers(name, [], float)
    if not found or not all(found):
      rope.refuse(name, 'is no list of numbers above 0')
    lists[f'rope_{name}s'] = ','.join(repr(float(x)) for x in found)
  return lists | {
    'rope_scaling': 'longrope',
    'rope_factor': max(factor, 1.0),
    'rope_original_length': length,
    'rope_attention_factor': rope('attention_factor', usual),
  }


def _needed(rope, name, low=0):
  """A number that must be there."""
  if rope.given(name) is None:
    rope.refuse(name, 'is not there, and its rope_type needs it')
  return rope(name, 0.0, low)


def _factor(rope):
  return _needed(rope, 'factor', 1)


def _mscale(rope, times):
  """rope_mscale of cos and sin: 1, or 0, which corrects nothing."""
  scale, every = rope('mscale', 0.0), rope('mscale_all_dim', 0.0)
  factor, usual = rope('attention_factor', -1.0), _usual(times)
  if factor < 0:
    if not (scale and every):
      return 1.0
    factor = _usual(times, scale) / _usual(times, every)
  if factor not in (1.0, usual):
    rope.refuse(
      'attention_factor',
      f'corrects scores by {factor}; here it is 1, or {usual}',
    )
  return float(factor == usual)


def _usual(factor, mscale=1.0):
  return 0.1 * mscale * math.log(factor) + 1.0


def _latent_mscale(rope, times):
  del times
  scale, every = rope('mscale', 0.0), rope('mscale_all_dim', 0.0)
  if rope('attention_factor', -1.0) >= 0 or not every or scale != every:
    rope.refuse(
      'mscale', f'is not mscale_all_dim={every}, or there is an '
      'attention_factor, which would correct rotated keys alone'
    )  # fmt: skip
  return every


def written_rope(model, latent=False):
  rope: dict[str, Any] = dict(rope_type='default', rope_theta=model.rope_theta)
  if model.rope_scaling == 'none':
    return rope
  rope |= dict(rope_type=model.rope_scaling, factor=model.rope_factor)
  if model.rope_scaling == 'longrope':
    listed = lambda text: [float(x) for x in text.split(',') if x]
    rope |= dict(
      short_factor=listed(model.rope_short_factors),
      long_factor=listed(model.rope_long_factors),
      attention_factor=model.rope_attention_factor,
    )
  low, high = model.rope_low_frequency, model.rope_high_frequency
  if model.rope_scaling == 'llama3':
    rope |= dict(low_freq_factor=low, high_freq_factor=high)
  if model.rope_scaling == 'yarn':
    rope |= dict(beta_slow=low, beta_fast=high)
    if not model.rope_truncate:
      rope['truncate'] = False
    if latent:
      rope |= dict.fromkeys(('mscale', 'mscale_all_dim'), model.rope_mscale)
    elif not model.rope_mscale:
      rope['attention_factor'] = 1.0
  if model.rope_scaling != 'linear':
    rope['original_max_position_embeddings'] = model.rope_original_length
  return rope


def written_length(model):
  """Tokens that files say a model was made for; we have no such field."""
  length = model.max_positions or model.rope_original_length
  return {'max_position_embeddings': round(length * model.rope_factor)}
