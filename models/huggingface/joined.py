"""Where queries, keys and values are in a matrix that has all of them.

Each function gives the transforms.Cut of its weight, and of its bias. Legend:
D model, N heads, K kv heads, H head width.
"""

from paraxis.models.huggingface import transforms

_ALL = slice(None)


def _stacked(what, d, n, k, h):
  """All queries, then all keys, then all values."""
  at = {'query': (0, n), 'key': (n, n + k), 'value': (n + k, n + 2 * k)}[what]
  heads, rows = n + 2 * k, slice(*at)
  return (
    transforms.Cut((heads * h, d), (heads, h, d), (rows,)),
    transforms.Cut((heads * h,), (heads, h), (rows,)),
  )


def _conv1d(what, d, n, k, h):
  """`_stacked`, with the inputs first."""
  weight, bias = _stacked(what, d, n, k, h)
  (heads, _, _), index = weight.view, (_ALL, *weight.index)
  return transforms.Cut((d, heads * h), (d, heads, h), index), bias


def _grouped(what, d, n, k, h):
  """For every kv head its queries, its key, its value."""
  each = n // k
  at = {'query': slice(0, each), 'key': each, 'value': each + 1}[what]
  total = (n + 2 * k) * h
  return (
    transforms.Cut((total, d), (k, each + 2, h, d), (_ALL, at)),
    transforms.Cut((total,), (k, each + 2, h), (_ALL, at)),
  )


def _codegen(what, d, n, k, h):
  """In four parts, each with its queries, values and keys."""
  del k
  i = ('query', 'value', 'key').index(what)
  view = (4, 3, n // 4, h)
  return (
    transforms.Cut((3 * n * h, d), (*view, d), (_ALL, i)),
    transforms.Cut((3 * n * h,), view, (_ALL, i)),
  )


def gated(what, names, at, sizes):
  """(tensor, cuts) of the queries, or of the gate of attention's output.

  Both in one matrix, head by head, unless the gate has a name.
  """
  d, n, h = sizes
  if 'attention_gate' in names:
    own = names['attention_gate'] if what == 'gate' else names['query']
    return f'{at}.{own}', (None, None)
  index = _ALL, ('query', 'gate').index(what)
  return f'{at}.{names["query"]}', (
    transforms.Cut((2 * n * h, d), (n, 2, h, d), index),
    transforms.Cut((2 * n * h,), (n, 2, h), index),
  )


KINDS = {
  'codegen': _codegen,
  'stacked': _stacked,
  'conv1d': _conv1d,
  'grouped': _grouped,
}
