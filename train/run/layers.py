"""Some layers of a run are the first ones of another: `--init_layers=0:6`.

Layer i of the origin becomes layer i of the new run, in every stack of layers;
the other layers of the new run are new, those of the origin left out.
"""

import re

import jax

from paraxis.configs.base import errors
from paraxis.models import stack as stack_lib
from paraxis.models import trained

PARAMS = 'params/'
STACKS = f'{PARAMS}layers/'
FLAG = '--init_layers'


def parse(text, depth, of):
  """'0:6' -> (0, 6). UserError: it is none, or `of` has not so many layers."""
  found = re.fullmatch(r'(\d{1,6}):(\d{1,6})', text)
  first, last = map(int, found.groups()) if found else (0, 0)
  if not first < last:
    raise errors.UserError(
      f'{FLAG}={text!r} is not FIRST:END, as 0:6: the layers 0 to 5.'
    )
  if last > depth:
    raise errors.UserError(
      f'{FLAG}={text}: {of} has {depth} layers, 0:{depth}.'
    )
  return first, last


def rows_of(like, rows):
  """A jax.ShapeDtypeStruct with so many rows, which no device shares."""
  spec = jax.P(None, *like.sharding.spec[1:])
  layout = jax.NamedSharding(like.sharding.mesh, spec)
  shape = rows, *like.shape[1:]
  return jax.ShapeDtypeStruct(shape, like.dtype, sharding=layout)


def part(config, job, text, like):
  """Makes the stacks in `like` those of the origin.

  A stack without a row of the layers asked for is removed: it is not read.

  Args:
    config: schema.Config of the origin. job: program.Job of the new run.
    text: as of `parse`.
    like: {canonical path: jax.ShapeDtypeStruct} of parameters.

  Returns:
    ({path: (rows of the new stack, rows of the origin that they are)} of stacks
    that are read in part, {path: words on that}).

  Raises:
    UserError: layers that do not exist, or are of another kind in the new run.
  """
  first, last = parse(text, job.config.model.num_layers, 'the new run')
  theirs = stack_lib.Stack(config.model, trained=trained.of(config.train))
  own, rows, words = job.model.stack, {}, {}
  for i in range(first, last):
    if theirs.pattern[i] != own.pattern[i]:
      raise errors.UserError(
        f'{FLAG}={text}: layer {i} is {theirs.pattern[i]} there, here '
        f'{own.pattern[i]} (model.pattern).'
      )
  for path in [p for p in like if p.startswith(STACKS)]:
    name = path.removeprefix(STACKS)
    if own.uses(name) != 1:
      raise errors.UserError(
        f'{FLAG}={text}: layers share {name}, which is of none alone: leave '
        f'out {FLAG}.'
      )
    there, here = theirs.owners.get(name, []), own.owners[name]
    both = [i for i in range(first, last) if i in there and i in here]
    if not both:
      del like[path]
      continue
    like[path] = rows_of(like[path], len(there))
    if both != here or both != there:
      rows[path] = tuple([of.index(i) for i in both] for of in (here, there))
      words[path] = f'layers {text}, {len(both)} of {len(here)}, others new'
  return rows, words
