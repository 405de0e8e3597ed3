"""Which parameters a run learns: `train.freeze`, and adapters (`train.lora`).

    y = x W + (alpha / rank) (x A) B        LoRA (arXiv:2106.09685, section 4.1)

A (inputs, rank) and B (rank, outputs) are parameters beside their target W:
PATH_lora_a, PATH_lora_b, stacked over layers and sharded as the dimensions of W
are. B begins at 0. Everything else is frozen, but what train.learn names; no
gradient of W is formed. The products are those of models/parameter.py: 2 T rank
(inputs + outputs) operations, and a sum of (T, rank) over the devices that
share a width. A side network (models/side.py) is learned likewise.

A frozen parameter is read as any other. It has no gradient and no state of the
optimizer, and stays bitwise as it was. `merged` adds A B to W.

Legend: T tokens.
"""

import fnmatch
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import parameter
from paraxis.sharding.checkpoint import fingerprint

COUNTED = 'statistic'  # the kind of a leaf that no run learns
A, B = parameter.ADAPTERS
SIDE = 'side/'  # before the paths of a side network
EMA = 'ema'  # of leaves of a state: averages of what is learned


class Trained(NamedTuple):
  """What a configuration says of it; freeze, learn, targets: patterns of paths.

  side: width of a side network (models/side.py), 0: none.
  """

  freeze: tuple = ()
  rank: int = 0
  alpha: float = 0.0
  targets: tuple = ()
  side: int = 0
  learn: tuple = ()

  @property
  def scale(self):
    """Of the product of two adapters."""
    return self.alpha / self.rank


EVERYTHING = Trained()


def of(train):
  """`Trained` of a schema.Train."""
  own, learn = train.lora, patterns(train.learn)
  if learn and not (own.rank or train.side):
    raise errors.UserError(
      f'train.learn={train.learn!r}: without train.lora.rank and train.side '
      'everything is learned but train.freeze: name the rest there.'
    )
  if not own.rank:
    if own.targets:
      raise errors.UserError(
        f'train.lora.targets={own.targets!r}, and train.lora.rank=0 adds no '
        'adapters: give a rank.'
      )
    return Trained(patterns(train.freeze), side=train.side, learn=learn)
  return Trained(
    patterns(train.freeze), own.rank, own.alpha, patterns(own.targets),
    learn=learn,
  )  # fmt: skip


def patterns(text):
  """'embedding, layers/mlp/*' -> its patterns; `*` also matches a '/'."""
  return tuple(filter(None, (part.strip() for part in text.split(','))))


def matching(field, given, paths):
  """{pattern: the paths that it matches}.

  Args:
    field: what `given` is the value of, for errors.
    given: `patterns` of it. paths: of all parameters.

  Raises:
    UserError: a pattern matches no path; it names near ones.
  """
  found, paths = {}, sorted(paths)
  for pattern in given:
    found[pattern] = fnmatch.filter(paths, pattern)
    if not found[pattern]:
      raise errors.UserError(
        f'{field}: {pattern!r} matches no parameter.'
        + (schema.suggest(pattern, paths) or f' There are {", ".join(paths)}.')
      )
  return found


def averages(saved, paths, flag, where):
  """{path: EMA/..., if a checkpoint has its average; else as it is}.

  What no run learns has none.

  Args:
    saved: paths in the checkpoint. paths: 'params/...'.
    flag: that asked. where: what an error calls the checkpoint.

  Raises:
    UserError: it has no average at all.
  """
  name = lambda path: f'{EMA}/{path.partition("/")[2]}'
  found = {p: name(p) if name(p) in saved else p for p in paths}
  if all(path == p for p, path in found.items()):
    raise errors.UserError(
      f'{flag}: {where} holds no average of its parameters '
      f'(optimizer.ema_decay was 0): leave out {flag}.'
    )
  return found


def is_adapter(path):
  """Is the path one of an adapter?"""
  return path.endswith((A, B))


def is_added(path):
  """Is it of what a run adds to a model: adapters, a side network?"""
  return is_adapter(path) or path.startswith((SIDE, f'params/{SIDE}'))


def frozen(trained, kinds):
  """frozenset of the paths that are not learned.

  Args:
    trained: `Trained`. kinds: {path: kind} of every leaf (models/decoder.py).

  Raises:
    UserError: as `matching`; nothing is left to learn.
  """
  paths = [p for p, kind in kinds.items() if kind != COUNTED]
  found = matching('train.freeze', trained.freeze, paths).values()
  out = frozenset(p for matched in found for p in matched)
  if trained.rank or trained.side:
    chosen = matching('train.learn', trained.learn, paths).values()
    learned = {p for matched in chosen for p in matched}
    _check_reached(trained, learned)
    out = out.union(p for p in paths if not (is_added(p) or p in learned))
  if out.issuperset(p for p in paths if kinds[p] != 'balance'):
    raise errors.UserError(
      f'train.freeze={",".join(trained.freeze)!r} matches all '
      f'{len(paths)} parameters: nothing is left to learn.'
    )
  return out


def _check_reached(trained, learned):
  """UserError if no gradient reaches what is to be learned."""
  ends = 'layers/', 'embedding', 'positions', 'frames'
  inside = sorted(p for p in learned if p.startswith(ends))
  if trained.side and inside:
    raise errors.UserError(
      f'train.learn={",".join(trained.learn)!r} matches {inside[0]}: beside a '
      f'side network (train.side={trained.side}) no gradient enters the layers '
      "or what is before them; name what is behind, such as 'head'."
    )


def _obstacle(path, leaf):
  """Why a leaf (of models/skeleton.py) can have no adapter; '': it can."""
  if path.endswith(parameter.OWN_ADAPTERS):
    return 'it is an adapter itself, part of the model'
  if leaf.kind != 'matrix':
    return 'it is no matrix of a product'
  if {'experts', 'choices'}.intersection(leaf.axes):
    return 'experts and their router are multiplied in a way of their own'
  return ''


def targets(trained, leaves):
  """frozenset of the paths of matrices that get adapters.

  A pattern with a `*` passes over what is no matrix; without targets, over what
  can have no adapter and the small matrices beside experts, too.

  Args:
    trained: `Trained`. leaves: {path: Leaf} of the base (models/skeleton.py).

  Raises:
    UserError: a pattern matches nothing, or what can have no adapter.
  """
  if not trained.rank:
    return frozenset()
  why = {path: _obstacle(path, leaf) for path, leaf in leaves.items()}
  if not trained.targets:
    # What every device holds ('norm') weighs experts.
    mine = lambda path: not why[path] and leaves[path].axes[0] != 'norm'
    return frozenset(filter(mine, leaves))
  found = matching('train.lora.targets', trained.targets, leaves)
  out = set()
  for pattern, matched in found.items():
    matrices = [p for p in matched if leaves[p].kind == 'matrix']
    for path in matrices or matched[:1]:
      if why[path]:
        raise errors.UserError(
          f'train.lora.targets: {pattern!r} matches {path}, which can have no '
          f'adapter: {why[path]}.'
        )
    out.update(matrices)
  return frozenset(out)


def adapted(make, chosen, trained):
  """rngs -> the module of `make`, with adapters beside the matrices `chosen`.

  They are made last: the base draws the numbers that it draws without them.

  Args:
    make: flax.nnx.Rngs -> module. chosen: set of paths in it, by '/'.
    trained: `Trained`.
  """

  def run(rngs) -> Any:
    module = make(rngs)
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
      if '/'.join(map(str, path)) in chosen:
        owner = module
        for name in path[:-1]:
          owner = getattr(owner, str(name))
        pair = parameter.adapters(
          rngs, variable, trained.rank, trained.scale,
          shared=parameter.shared(variable),
        )  # fmt: skip
        for name, adapter in zip(parameter.beside(path[-1]), pair, strict=True):
          setattr(owner, name, adapter)
    return module

  return run


def merged(params, scale):
  """{path: array} without adapters, each of them added to its target.

  Args:
    params: {path: array}, stacked; their mesh in force.
    scale: alpha / rank.
  """
  out = {p: x for p, x in params.items() if not is_adapter(p)}
  for path, w in out.items():
    if path + A in params:
      out[path] = merge(w, params[path + A], params[path + B], scale, w.dtype)
  return out


def merge(w, a, b, scale, dtype=None):
  """W + scale A B of stacked arrays, in at least float32.

  dtype: to which the sum is cast; None: it is not.
  """
  with fingerprint.keeps_bits((w, a, b)):
    return _merge(w, a, b, scale, dtype)


@functools.partial(jax.jit, static_argnames=('scale', 'dtype'))
def _merge(w, a, b, scale, dtype):
  wide = jnp.promote_types(w.dtype, jnp.float32)
  inputs = a.ndim - 2
  first, second = 'abcdefgh'[:inputs], 'ijklmnop'[: b.ndim - 2]
  more = jnp.einsum(
    f'L{first}r,Lr{second}->L{first}{second}',
    a.astype(wide), b.astype(wide), precision='highest',
  )  # fmt: skip
  return (w.astype(wide) + scale * more).astype(dtype or wide)
