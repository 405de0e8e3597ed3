"""Rows of a family's table: a field of config.json and ours, both ways.

A row reads {our dotted field: value} from a `Reader`, and writes {their field:
value} from a schema.Model. Only readers refuse: what a writer could not say is
found by reading it back (config.py).
"""

import dataclasses
import math
from typing import Any

from paraxis.configs.base import errors

MISSING: Any = object()


class Reader:
  """config.json as a family reads it; remembers which fields were read."""

  def __init__(self, config, path='config.json'):
    self.config, self.path, self.used = config, path, set()
    self.partial = False  # whether the family rotates a part of a head

  def __call__(self, name, default: Any = MISSING) -> Any:
    """The value of a field; null is the default. UserError: it must be."""
    self.used.add(name)
    value = self.config.get(name)
    if value is None and default is MISSING:
      raise errors.UserError(
        f'{self.path} has no {name!r}, which its model_type needs.'
      )
    return default if value is None else value

  def refuse(self, name, why):
    """UserError that names a field of config.json and its value."""
    value = self.config.get(name)
    raise errors.UserError(f'{self.path}: {name}={value!r} {why}.')


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

  def read(self, config):
    for name in self.other:
      if config(name, None) is not None:
        return {self.ours: config(name)}
    return {self.ours: config(self.theirs, self.default)}

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
    given = config(self.theirs, self.default)
    if given not in self.values:
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
    default = self.only if self.default is MISSING else self.default
    if config(self.theirs, default) != self.only:
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
  for n in range(1, len(letters) + 1):
    if all(letters[i] == letters[i % n] for i in range(len(letters))):
      return letters[:n]
  return letters


def rope(theta=1e4, **options):
  """Rotary positions: `rope_parameters`, or the older fields of their own.

  theta: of a file that has none.
  """
  return Computed(
    lambda config: _read_rope(config, theta, **options),
    lambda model: (
      {'rope_parameters': written_rope(model, **options)}
      | written_length(model)
    ),
  )


OLD_ROPE = ('rope_theta', 'rope_scaling', 'rope_local_base_freq')


def _read_rope(config, theta, **options):
  name = 'rope_parameters'
  rope = config(name, None)
  old = config('rope_scaling', None)
  if rope is None:
    name, rope = 'rope_scaling', dict(old or {})
    rope.setdefault('rope_theta', config('rope_theta', theta))
  return scaling(config, name, rope, theta, **options)


def scaling(config, name, rope, theta=1e4, latent=False):
  """Our fields of one dictionary of rotary parameters.

  latent: of latent attention, whose scores YaRN corrects, not cos and sin.
  """
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if rope.get('partial_rotary_factor', 1.0) != 1 and not config.partial:
    config.refuse(name, 'has a partial_rotary_factor other than 1')
  out = {'rope_theta': float(rope.get('rope_theta') or theta)}
  length = config('max_position_embeddings', 8192)
  out['rope_original_length'] = int(
    rope.get('original_max_position_embeddings') or length
  )
  if kind == 'default':
    return {'rope_theta': out['rope_theta']}
  if kind not in ('linear', 'llama3', 'yarn'):
    config.refuse(name, 'has a rope_type other than linear, llama3 and yarn')
  out |= {'rope_scaling': kind, 'rope_factor': float(rope['factor'])}
  if kind == 'linear':
    del out['rope_original_length']
  if kind == 'llama3':
    out['rope_low_frequency'] = float(rope['low_freq_factor'])
    out['rope_high_frequency'] = float(rope['high_freq_factor'])
  if kind == 'yarn':
    out['rope_low_frequency'] = float(rope.get('beta_slow') or 1)
    out['rope_high_frequency'] = float(rope.get('beta_fast') or 32)
    out['rope_truncate'] = bool(rope.get('truncate', True))
    scale = _latent_mscale if latent else _mscale
    out['rope_mscale'] = scale(config, name, rope)
  return out


def _mscale(config, name, rope):
  """rope_mscale of cos and sin: 1, or 0, which corrects nothing."""
  scale, every = rope.get('mscale'), rope.get('mscale_all_dim')
  factor, usual = rope.get('attention_factor'), _usual(rope['factor'])
  if factor is None:
    if not (scale and every):
      return 1.0
    factor = _usual(rope['factor'], scale) / _usual(rope['factor'], every)
  if factor not in (1.0, usual):
    config.refuse(
      name, f'corrects scores by {factor}; here it is 1, or {usual}'
    )
  return float(factor == usual)


def _usual(factor, mscale=1.0):
  return 0.1 * mscale * math.log(factor) + 1.0


def _latent_mscale(config, name, rope):
  scale, every = rope.get('mscale'), rope.get('mscale_all_dim')
  if rope.get('attention_factor') is not None or not every or scale != every:
    config.refuse(
      name, 'has an attention_factor, or an mscale other than mscale_all_dim, '
      'which would correct rotated keys alone'
    )  # fmt: skip
  return float(every)


def written_rope(model, latent=False):
  rope: dict[str, Any] = dict(rope_type='default', rope_theta=model.rope_theta)
  if model.rope_scaling == 'none':
    return rope
  rope |= dict(rope_type=model.rope_scaling, factor=model.rope_factor)
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
