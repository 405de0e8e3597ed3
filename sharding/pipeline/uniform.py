"""Collectives in branches on which devices do not agree: found while tracing.

A device that takes another branch, or leaves a loop earlier, does not send what
the others wait for: on accelerators the program hangs, on CPU it is aborted
after a while. In a region with check_vma=False jax does not check this; here
values that are equal on all devices (constants, loop counters, full sums) are
followed through the traced program, all others may differ.
"""

from jax.extend import core
from jax.extend import source_info_util

from paraxis.configs.base import errors
from paraxis.sharding import annotate
from paraxis.sharding.meter import traced

COLLECTIVES = (
  'all_gather', 'all_to_all', 'pmax', 'pmin', 'ppermute', 'psum',
  'psum_invariant', 'psum_scatter', 'ragged_all_to_all', 'reduce_scatter',
)  # fmt: skip
_SUMS = ('psum', 'psum_invariant', 'pmax', 'pmin')


def check(jaxpr, what):
  """UserError if a collective of a traced function hangs on a divergent branch.

  Args:
    jaxpr: ClosedJaxpr, traced in the region that it is for; its inputs, and
      what it closes over, may differ between devices.
    what: whose code it is, for the message.
  """
  _walk(jaxpr.jaxpr, [False] * len(jaxpr.jaxpr.invars), what)


def _bodies(equation):
  return list(core.jaxprs_in_params(equation.params))


def _sent(jaxpr):
  """The first collective in a jaxpr, at any depth, or None."""
  for equation in jaxpr.eqns:
    if equation.primitive.name in COLLECTIVES:
      return equation
    for body in _bodies(equation):
      found = _sent(body)
      if found:
        return found
  return None


def _refuse(equation, what, how):
  sent = next(filter(None, map(_sent, _bodies(equation))), None)
  if sent is not None:
    where = traced.line(sent.source_info) or traced.line(equation.source_info)
    where = where or source_info_util.summarize(sent.source_info)
    raise errors.UserError(
      f'{what}: {sent.primitive.name} at {where} is inside {how} on which '
      'devices may not agree, and would wait for ever: compute both sides and '
      'select with where, or make the predicate equal on all devices (a psum '
      'over the whole mesh).'
    )


def _walk(jaxpr, same, what):
  """[whether a result is the same on all devices]; same: so of each input."""
  known = dict(zip(jaxpr.invars, same, strict=True))
  of = lambda v: isinstance(v, core.Literal) or known.get(v, False)
  for equation in jaxpr.eqns:
    outs = _equation(equation, [of(v) for v in equation.invars], what)
    known |= dict(zip(equation.outvars, outs, strict=True))
  return [of(v) for v in jaxpr.outvars]


def _equation(equation, ins, what):
  name, params = equation.primitive.name, equation.params
  bodies = _bodies(equation)
  if name == 'axis_index':
    return [False]
  if name in traced.KERNELS:
    return [all(ins)] * len(equation.outvars)
  if name in _SUMS and set(params['axes']) >= set(annotate.sizes()):
    return [True] * len(equation.outvars)
  if name == 'scan':
    return _scan(equation, bodies[0], ins, what)
  if name == 'while':
    return _while(equation, ins, what)
  if name == 'cond':
    if not ins[0]:
      _refuse(equation, what, 'a branch')
    outs = [_walk(b, ins[1:], what) for b in bodies]
    return [ins[0] and all(side) for side in zip(*outs, strict=True)]
  if len(bodies) == 1 and len(bodies[0].invars) == len(ins):
    return _walk(bodies[0], ins, what)
  for body in bodies:
    _walk(body, [False] * len(body.invars), what)
  return [all(ins) and not bodies] * len(equation.outvars)


def _while(equation, ins, what):
  """Like _scan; and all devices leave together if the condition is the same."""
  params = equation.params
  cond, body = params['cond_jaxpr'].jaxpr, params['body_jaxpr'].jaxpr
  consts, more = params['cond_nconsts'], params['body_nconsts']
  carry = ins[consts + more :]
  while True:
    outs = _walk(body, ins[consts : consts + more] + carry, what)
    kept = [a and b for a, b in zip(carry, outs, strict=True)]
    if kept == carry:
      break
    carry = kept
  if _walk(cond, ins[:consts] + carry, what) == [True]:
    return carry
  _refuse(equation, what, 'a loop with a condition')
  return [False] * len(equation.outvars)


def _scan(equation, body, ins, what):
  """A carry is the same if it starts so and every turn keeps it so."""
  # By shape, because releases of jax name the numbers differently: what is
  # scanned over, and what is stacked, has one more axis outside than inside.
  alike = lambda outer, inner: sum(
    a.aval.shape == b.aval.shape for a, b in zip(outer, inner, strict=True)
  )
  carry = alike(equation.outvars, body.outvars)
  consts = alike(equation.invars, body.invars) - carry
  same = list(ins)
  while True:
    outs = _walk(body, same, what)
    kept = [
      a and b
      for a, b in zip(same[consts : consts + carry], outs[:carry], strict=True)
    ]
    if kept == same[consts : consts + carry]:
      return outs
    same[consts : consts + carry] = kept
