"""`paraxis decode --certify`: is decoding the model without a cache?

Every kind of mixer, patterns that are named, or a checkpoint's model, in
float64 (cases.py). A row of the table holds the verdict on a property,
its bound, what was measured, and where:

    cached = uncached    prompts in whole, in pieces beside tokens of other
                         requests, then token by token
    tree                 two requests' branches in one step = every path alone;
                         a state of one size serves no branches: a chain
    kept in part         some drafts of a chain, then a rollback, and another
                         continuation
    a fork               and a fork of it, beside their parent
    given away           a row, to the next request
    state                grows with the tokens where its mixer declares slots
    MESH = one device    by virtual devices; REFUSED, by the engine itself, is
                         no failure
    greedy METHOD        the text of decoding one by one, token for token, and
                         that one the likeliest tokens without a cache; 'no
                         draft kept': it shows nothing of the method
    judge JUDGE          the joint of LONG tokens is the model's, by chi-square

Where a mixer declares that its steps are not its whole pass (protocol.py), a
difference is CHANGES THE NUMBERS, else FAIL; both are exit code 1.
"""

import collections
import json
import math
import textwrap

import jax

from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.decode.certify import cases
from paraxis.decode.certify import properties


def line(row):
  """A Row as a line of the table."""
  if row.word not in ('PASS', 'FAIL'):
    text = f'{row.word}: {row.name}, {row.why}'
    if row.measured:
      text += f'; off by {row.measured:.1e}, most in {row.worst}'
    return textwrap.fill(text, 80, subsequent_indent=' ' * 6)
  text = f'{row.word}  {row.name:46} {row.bound:7.0e} {row.measured:8.1e}'
  return f'{text}  {row.worst}'.rstrip()


def _summary(rows):
  """'all 120 properties hold; refused: 9', or what does not."""
  words = collections.Counter(row.word for row in rows)
  refused = words.pop(properties.REFUSED, 0)
  total, held = sum(words.values()), words.pop('PASS', 0)
  text = f'all {total} properties hold'
  if held < total:
    differ = words.pop('FAIL', 0)
    texts = [f'{differ} of {total} properties DIFFER'] if differ else []
    text = '; '.join(texts + [f'{word}: {n}' for word, n in words.items()])
  return text + (f'; refused: {refused}' if refused else '')


def _proven(case, mesh_text, report):
  """[Row] of every property of a Case."""
  rows = []
  with jax.enable_x64(True):
    proof = properties.Proof(case, mesh_text)
    for prove in properties.PROPERTIES:
      for row in prove(proof):
        report(row)
        rows.append(row)
  return rows


def _judged(report):
  with jax.enable_x64(True):
    rows = list(properties.judged())
  for row in rows:
    report(row)
  return rows


def _json(rows, notes):
  """One JSON document; a measured value that is not finite is null."""
  finite = lambda x: x if math.isfinite(x) else None
  return json.dumps(
    dict(
      dtype='float64',
      devices=jax.device_count(),
      jax=jax.__version__,
      passed=all(row.passed for row in rows),
      rows=[
        r._asdict() | dict(measured=finite(r.measured), passed=r.passed)
        for r in rows
      ],
      notes=notes,
    ),
    indent=1,
  )


def run(names, make, mesh_text='', as_json=False, say=print):
  """`paraxis decode --certify` -> exit code: 0 all hold, 1 something differs.

  Args:
    names: patterns; (): every kind of mixer, two in a model, and each alone of
      a model that fails.
    make: pattern -> cases.Case.
    mesh_text: --mesh=. as_json: one JSON document instead of the table.
    say: prints one line.

  Raises:
    UserError: as `cases.small` and `Proof`.
  """
  left = collections.deque(names or cases.patterns())
  show = (lambda text: None) if as_json else say
  show(
    f'decoding with a cache against none: {jax.device_count()} '
    f'{jax.devices()[0].platform} devices, float64, jax {jax.__version__}'
  )
  show(f'      {"property":46} {"bound":>7} {"measured":>8}  most in')
  rows, notes = [], {}
  while left:
    case = make(left.popleft())
    letters = mixers.of_pattern(case.name)[0]
    words = dict.fromkeys(mixers.TABLE[letter].word for letter in letters)
    show(textwrap.fill(f'{case.name}: {", ".join(words)}', 80))
    if case.notes:
      notes[case.name] = case.notes
      show(textwrap.fill(f'changed: {"; ".join(case.notes)}', 80))
    found = _proven(case, mesh_text, lambda row: show(line(row)))
    rows += found
    if not names and len(letters) > 1 and not all(r.passed for r in found):
      left.extend(letter for letter in letters if letter not in left)
  show('judges')
  rows += _judged(lambda row: show(line(row)))
  if as_json:
    say(_json(rows, notes))
  show(_summary(rows))
  held = all(row.passed for row in rows)
  return errors.EXIT_OK if held else errors.EXIT_DIFFERENT
