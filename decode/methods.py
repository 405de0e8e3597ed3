"""The table of methods: from the fields of schema.Decode to an object.

What each drafts, and its file:

    autoregressive nothing: a call makes one token                proposal.py
    prompt_lookup  what followed the last tokens before           copying.py
    aggressive     the prompt, as far as the text copies it       copying.py
    jacobi         the draws of the call before                   jacobi.py
    speculative    the first layers of the model, one by one      drafters.py
    pearl          the same, while the model judges               drafters.py
    easyspec       the same, with layers side by side             drafters.py
    medusa         heads on the model's features, a tree          heads.py
    eagle          a layer that continues the features            eagle.py
    falcon         the same, two features a pass                  falcon.py
    ppd            prompt tokens behind every draft, a tree   prompt_tokens.py
    unmask         nothing: it fills a canvas of masks      unmask/canvas.py
    wavefront      nothing: many tokens, few passes deeper      wavefront.py
"""

import functools
from typing import Any, NamedTuple

import jax

from paraxis.configs.base import errors
from paraxis.configs.base.decode import METHODS
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import trees
from paraxis.decode import wavefront
from paraxis.decode.drafts import copying
from paraxis.decode.drafts import drafters
from paraxis.decode.drafts import eagle
from paraxis.decode.drafts import falcon
from paraxis.decode.drafts import heads
from paraxis.decode.drafts import jacobi
from paraxis.decode.drafts import prompt_tokens
from paraxis.decode.unmask import canvas
from paraxis.decode.unmask import filters
from paraxis.decode.unmask import sub_blocks
from paraxis.models import layer

# Method -> kind of its file, heads.KINDS.
FILES = {
  'medusa': 'medusa', 'eagle': 'eagle', 'falcon': 'falcon', 'ppd': 'ppd',
  **dict.fromkeys(('speculative', 'pearl', 'easyspec'), 'speculative'),
  'unmask': 'filter',
}  # fmt: skip
OF_LAYERS = 'speculative', 'pearl', 'easyspec'
MASKED = ('unmask',)  # for models of masks alone
CHANGING = (*MASKED, 'wavefront')  # whose text is not that of one by one
# Fields of schema.Decode, or sections, that other methods pass over.
READ_BY = {
  'drafts': tuple(n for n in METHODS if n not in ('autoregressive', *CHANGING)),
  'draft_layers': OF_LAYERS,
  'draft_group': ('easyspec',),
  'judge': tuple(n for n in METHODS if n not in CHANGING),
  'unmask': MASKED,
  'wavefront': ('wavefront',),
}
NEEDED = ('medusa', 'eagle', 'falcon', 'ppd')  # without one there are no drafts


class Choice(NamedTuple):
  """Fields of schema.Decode that say what drafts."""

  method: str
  drafts: int
  draft_layers: int
  draft_group: int
  judge: str
  unmask: Any
  wavefront: Any

  @classmethod
  def of(cls, config):
    return cls(*(getattr(config, name) for name in cls._fields))


def forwards(choice) -> int:
  """How often a call runs the draft model, or the draft layer, of a Choice or
  of what has its fields; reading the prompt is none of it."""
  if choice.method == 'falcon':  # the first pass reads what was kept
    return -(-choice.drafts // falcon.BLOCK)
  # A pass for each draft, and one of what was kept before, or of the last.
  each = choice.method in (*OF_LAYERS, 'eagle')
  return choice.drafts + 1 if each else 0


def of(model, choice, about=None):
  """The method, for a decoder.Decoder.

  Args:
    choice: Choice. about: heads.About of decode.draft, or None.

  Raises:
    UserError: the model, the judge or the draft cannot serve the method.
  """
  _check_visibility(model.config, choice)
  _check_recurrence(model.config, choice.method)
  made = _made(model, choice, about)
  if not made.tree.is_chain:
    _check_tree(model, choice.method)
  return made


def check_training(model, kind, layers):
  """UserError if a model could not use a draft that is trained for it.

  Args:
    kind: of heads.KINDS, not filter. layers: of the draft model.
  """
  if kind == 'speculative':
    _check_recurrence(model.config, kind)
    _check_layers(model.config, kind, layers)
  elif kind in ('eagle', 'falcon'):
    _check_last(model, kind)
  else:
    _check_tree(model, kind)


def check_arrays(model, path, about, arrays):
  """UserError if the layer of a draft is not of the kind of the model's last.

  Args:
    path, about, arrays: of heads.load.
  """
  initial = dict(eagle=eagle.initial, falcon=falcon.initial).get(about.kind)
  if not initial:
    return

  def begun():
    return initial(model, model.unstack(model.init(jax.random.key(0))))

  want = {name: x.shape for name, x in jax.eval_shape(begun).items()}
  have = {name: x.shape for name, x in arrays.items() if name != heads.WORDS}
  for name in sorted({*want, *have}):
    if have.get(name) != want.get(name):
      there, here = have.get(name, 'absent'), want.get(name, 'absent')
      raise heads.another(path, [f'{name} {there}, here {here}'])


def _made(model, choice, about):
  method, width = choice.method, choice.drafts
  coupled = judges.JUDGES[choice.judge].coupled
  if about and method not in FILES:
    raise errors.UserError(
      f'decode.method={method} uses no trained draft: leave out decode.draft, '
      f'or take one of {", ".join(FILES)}.'
    )
  if about and about.kind != FILES[method]:
    raise errors.UserError(
      f'decode.draft was trained for decode.method={about.kind}, not {method}.'
    )
  if method == 'unmask':
    return _unmask(model, choice.unmask, about)
  if method == 'autoregressive':
    return proposal.Autoregressive()
  if method == 'wavefront':
    return wavefront.Wavefront(model, choice.wavefront)
  if method == 'prompt_lookup':
    return copying.Lookup(width)
  if method == 'aggressive':
    return copying.Aggressive(width)
  if method == 'jacobi':
    return jacobi.Jacobi(width, model.config.vocab_size, coupled)
  if method in NEEDED and not about:
    raise errors.UserError(
      f'decode.method={method} needs a trained draft: name its file with '
      'decode.draft (`paraxis draft` trains one).'
    )
  if method in ('eagle', 'falcon'):
    return _layer(method, model, width, coupled)
  if method == 'medusa':
    return heads.Medusa(model, trees.grown(about.accuracy, width))
  if method == 'ppd':
    return prompt_tokens.Ppd(model, about.accuracy, width)
  draft = _draft(model, choice, about)
  if method == 'speculative':
    return drafters.Speculative(draft, width, coupled)
  if method == 'easyspec':
    return _easyspec(draft, choice, coupled)
  return _pearl(draft, choice)


def _unmask(model, policy, about):
  sub_blocks.check(model.config, policy)
  kind = sub_blocks.SubBlocks if policy.sub_cache else canvas.Unmask
  made, reads = kind(model, policy), policy.score == 'filter'
  if about and not reads:
    raise errors.UserError(
      f'decode.draft is a filter, and decode.unmask.score={policy.score} does '
      'not read it: leave out decode.draft, or take score=filter.'
    )
  if reads and policy.credit_weight:
    raise errors.UserError(
      f'decode.unmask.credit_weight={policy.credit_weight:g} changes the '
      'confidences that a filter (score=filter) was trained on: take one of '
      'them.'
    )
  if reads:
    filters.check(about, made.width)
  return made


def _check_visibility(model, choice):
  """UserError if a masked model is to draft, or another one to fill masks."""
  says = f'decode.method={choice.method}'
  if choice.method not in MASKED:
    if model.visibility != 'causal':
      raise errors.UserError(
        f'{says} makes the next token from those before it, and a token of '
        f'model.visibility={model.visibility} sees those behind it too: take '
        'decode.method=unmask.'
      )
  elif model.visibility == 'causal' or model.mask_id < 0:
    raise errors.UserError(
      f'{says} fills masks, and model.visibility={model.visibility}, '
      f'model.mask_id={model.mask_id} is no model of masks '
      '(train.objective=masked makes one): take decode.method=autoregressive.'
    )


def _check_tree(model, method):
  """UserError if layers have no branches."""
  if kinds := _recurrent(model):
    raise errors.UserError(
      f'decode.method={method} drafts a tree, and layers of kind {kinds} keep '
      'one state a request, which has no branches: take a method that drafts a '
      'chain (speculative, jacobi, prompt_lookup).'
    )


def _check_recurrence(model, method):
  """UserError if layers of a model with a core are to draft alone."""
  core = model.recurrence.core
  if core and method in OF_LAYERS:
    raise errors.UserError(
      f'decode.method={method} drafts with the first layers of a model, '
      f'and those of one with model.recurrence.core={core} make no features of '
      'their own: take wavefront, or what drafts otherwise (prompt_lookup, '
      'jacobi, eagle).'
    )


def _draft(model, choice, about):
  """drafters.Draft: the first layers of the model."""
  layers = choice.draft_layers
  if about:
    if layers not in (0, about.layers):
      raise errors.UserError(
        f'decode.draft_layers={layers}, and decode.draft was trained for '
        f'{about.layers}: leave one out.'
      )
    layers = about.layers
  _check_layers(model.config, choice.method, layers)
  small = drafters.first_layers(model, layers)
  say = functools.partial(heads.said, small) if about else None
  return drafters.Draft(small, say)


def _check_layers(model, method, layers):
  """UserError unless some layers draft, and not all."""
  most = model.num_layers
  if not 0 < layers < most:
    advice = f'take 1 to {most - 1}' if most > 1 else 'one layer is too few'
    raise errors.UserError(
      f'decode.method={method} drafts with the first layers of the model: '
      f'decode.draft_layers={layers} of {most}; {advice}.'
    )
  each = model.group_layers
  if layers % each:
    raise errors.UserError(
      f'decode.method={method} drafts with the first layers of the model: '
      f'decode.draft_layers={layers} cuts a group of {each} layers, which read '
      f'the same (model.groups={model.groups}); take a multiple of {each}.'
    )


def _pearl(draft, choice):
  """Its judge draws by the noise of places, and its drafts are forgotten by a
  shorter length."""
  if choice.judge != 'replay':
    raise errors.UserError(
      f'decode.method=pearl judges drafts that are not all there yet: it takes '
      f'decode.judge=replay, not {choice.judge}.'
    )
  _forgets(draft, 'pearl')
  return drafters.Pearl(draft, choice.drafts)


def _easyspec(draft, choice, coupled):
  _forgets(draft, 'easyspec')
  layers, group = draft.model.config.num_layers, choice.draft_group
  if group > layers:
    raise errors.UserError(
      f'decode.draft_group={group}: layers that read the same features, of '
      f'{layers} that draft; take 1 to {layers}.'
    )
  return drafters.EasySpec(draft, choice.drafts, group, coupled)


def _forgets(draft, method):
  """UserError if the draft model cannot forget drafts by a shorter length."""
  if kinds := _recurrent(draft.model):
    raise errors.UserError(
      f'decode.method={method} forgets drafts, and layers of kind {kinds} keep '
      'one state a request: take method=speculative, or draft_layers without '
      'them.'
    )


def _layer(method, model, width, coupled):
  """What drafts with a layer of its own: eagle, falcon."""
  make = eagle.Eagle if method == 'eagle' else falcon.Falcon
  _check_last(model, method)
  return make(model, width, coupled)


def _check_last(model, method):
  """UserError if the last layer cannot draft: what it reads is one row of
  features, and it forgets drafts by a shorter length."""
  if model.config.stream_copies:
    raise errors.UserError(
      f'decode.method={method} has a layer that goes on from the features of '
      f'one row, and model.streams={model.config.streams} reads as many copies '
      'of each: take method=medusa or speculative.'
    )
  if kinds := _recurrent(eagle.layer_of(model)):
    raise errors.UserError(
      f'decode.method={method} forgets drafts, and the last layer of the model '
      f'is of kind {kinds}, which keeps one state a request: take '
      'method=speculative.'
    )


def _recurrent(model):
  """Letters of the layers that keep one state a request, or ''."""
  able = {k[0]: layer.MIXERS[k[0]].capabilities for k in model.pattern}
  return ', '.join(
    sorted(kind for kind, x in able.items() if x.recurs or not x.slots)
  )
