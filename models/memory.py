"""Memory policy: what becomes of each named activation until its backward pass.

    save       it stays on the device
    offload    it is copied to the host's pinned memory and fetched back
    recompute  it is made again from what was kept

`train.remat` gives every name an action, `train.memory` changes some of them:

    remat       none   attention        dots                  full
    saved       all    attention, scan  those, products       none

MEMO (arXiv:2407.12117, section 4) offloads the input and the attention output
of a layer and recomputes the rest: remat=full with the table
'residual=offload,attention=offload'. Cost: offload moves a tensor's bytes twice
over the host link, recompute repeats the operations since the last name kept.

A name helps only where the backward pass reads the named value itself: name
what goes into a nonlinearity or a norm, not what comes out, else the product is
repeated although its result is there (the tests count products).
"""

from typing import Any

import jax

from paraxis.configs import schema
from paraxis.configs.base import errors

NAMES = {
  'residual': 'input of a layer',
  'query': 'queries as they are projected',
  'key': 'keys as they are projected',
  'value': 'values as they are projected',
  'attention': 'attention output and its log-sum-exp',
  'scan': 'what a recurrence makes, and the states it needs for gradients',
  'output': 'projection of the attention output',
  'up': 'mlp, before the nonlinearity',
  'gate': 'mlp gate, before its nonlinearity',
  'down': 'output of the mlp',
}
ACTIONS = ('save', 'offload', 'recompute')
HOST = 'pinned_host'
_SAVED = {
  'none': set(NAMES),
  'attention': {'attention', 'scan'},
  'dots': set(NAMES) - {'residual'},
  'full': set(),
}


def parse(text):
  """'attention=offload,gate=save' -> {'attention': 'offload', 'gate': 'save'}.

  Raises:
    UserError: an unknown name or action, a name twice, or 'residual=recompute'
      (everything else is recomputed from it).
  """
  table = {}
  for part in filter(None, text.replace(' ', '').split(',')):
    name, _, action = part.partition('=')
    for what, value, valid in (
      ('name', name, tuple(NAMES)),
      ('action', action, ACTIONS),
    ):
      if value not in valid:
        raise errors.UserError(
          f'train.memory={text!r}: {part!r} is no NAME=ACTION: the {what} '
          f'{value!r} is not one of {", ".join(valid)}.'
          + schema.suggest(value, valid)
        )
    if name in table:
      raise errors.UserError(f'train.memory={text!r}: {name!r} is there twice.')
    if (name, action) == ('residual', 'recompute'):
      raise errors.UserError(
        f"train.memory={text!r}: 'residual' is what the rest of a layer is "
        'recomputed from: save or offload it.'
      )
    table[name] = action
  return table


def actions(remat, text=''):
  """{name: action} of all `NAMES` under both fields of schema.Train."""
  saved = _SAVED[remat]
  default = {n: 'save' if n in saved else 'recompute' for n in NAMES}
  return default | {'residual': 'save'} | parse(text)


def policy(remat, text=''):
  """The policy for jax.checkpoint around a layer; None: no jax.checkpoint.

  Args:
    remat: schema.Train.remat.
    text: schema.Train.memory. With a table only names count: what has none is
      recomputed, under remat=none too. Empty: dots keeps the products that have
      no name as well, none keeps everything but what lies between the products
      of the mlp.

  Raises:
    UserError: as `parse`; something is to be offloaded, and the device that the
      program is built for has no pinned host memory.
  """
  policies = jax.checkpoint_policies
  chosen = actions(remat, text)
  if not parse(text):
    attention = policies.save_only_these_names(*_SAVED['attention'])
    return {
      'none': None,
      'attention': attention,
      'dots': policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, attention
      ),
      'full': policies.nothing_saveable,
    }[remat]
  named = lambda action: [n for n in NAMES if chosen[n] == action]
  if named('offload'):
    _check_host(text, named('offload'))
  return policies.save_and_offload_only_these_names(
    names_which_can_be_saved=named('save'),
    names_which_can_be_offloaded=named('offload'),
    offload_src='device',
    offload_dst=HOST,
  )


def _memories():
  """(device, kinds of memory) that the program is built for."""
  settings: Any = jax.config
  device = settings.jax_default_device
  if isinstance(device, str):  # the option also takes a platform's name
    device = jax.devices(device)[0]
  device = device or jax.devices()[0]
  return device.device_kind, [m.kind for m in device.addressable_memories()]


def _check_host(text, names):
  device, kinds = _memories()
  if HOST not in kinds:
    raise errors.UserError(
      f'train.memory={text!r}: {device} has no {HOST} memory (it has '
      f'{", ".join(kinds)}): save or recompute {", ".join(names)}.'
    )
