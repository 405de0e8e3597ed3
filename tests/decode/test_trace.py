"""The record of every call says what the text says, place by place."""

import json

import module_cases
import numpy as np
import pytest
import support

from paraxis.decode import trace as trace_lib
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads

pytestmark = pytest.mark.usefixtures('float64')

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5] * 6, [7, 8, 9, 10, 11, 0]]
LOOKUP = dict(method='prompt_lookup', drafts=3)
SAMPLED = dict(temperature=0.8, top_k=6, seed=3)
GREEDY = dict(temperature=0.0)


@pytest.fixture
def tree(tmp_path):
  """Options of a tree of drafts of heads that nobody trained."""
  model = module_cases.generator('F').built.model
  params = model.unstack(module_cases.parameters(model, 0.4))
  path = str(tmp_path / 'heads.npz')
  heads.save(path, *distill.untrained(model, params, 'medusa', 'numbers'))
  return dict(method='medusa', draft=path, drafts=11)


def _check(result):
  """Raises where a row's trace is not that of its text."""
  trace, final = result['trace'], result['trace'].final
  assert trace.calls == result['calls'] == len(final)
  made = final.sum(1)
  assert (
    np.bincount(made, minlength=len(result['lengths'])).tolist()
    == (result['lengths'])
  )
  # What is final comes first, and is the text behind its first token.
  assert (np.sort(final)[:, ::-1] == final).all()
  assert trace.tokens[final].tolist() == result['tokens'][1:]
  np.testing.assert_allclose(
    trace.logprobs[final], result['logprobs'][1:], atol=1e-6
  )
  # Drafts that were kept are the tokens; the one behind them is no such draft,
  # but where the text has ended.
  for call, n in enumerate(made):
    canvas, tokens = trace.canvas[call], trace.tokens[call]
    assert (canvas[: n - 1] == tokens[: n - 1]).all()
    assert canvas[n - 1] != tokens[n - 1] or call == trace.calls - 1


@pytest.mark.parametrize('sampled', ['greedy', 'drawn'])
@pytest.mark.parametrize(
  'method', ['autoregressive', 'lookup', 'draft', 'tree']
)
def test_a_trace_is_the_text(method, sampled, tree):
  draft = dict(method='speculative', drafts=3, draft_layers=1)
  options = dict(autoregressive={}, lookup=LOOKUP, draft=draft, tree=tree)
  chosen = options[method] | dict(max_new_tokens=24)
  chosen |= GREEDY if sampled == 'greedy' else SAMPLED
  made = module_cases.generator('F')
  results = made.generate(PROMPTS, trace=True, **chosen)
  plain = made.generate(PROMPTS, **chosen)
  assert [r['tokens'] for r in plain] == [r['tokens'] for r in results]
  for result, other in zip(results, plain, strict=True):
    assert 'trace' not in other
    _check(result)
    trace = result['trace']
    most = np.exp(trace.logprobs)
    if sampled == 'greedy':
      np.testing.assert_allclose(trace.confidence, most, rtol=1e-5)
    assert (trace.confidence >= most - 1e-6).all()
  nothing = np.concatenate([r['trace'].canvas.ravel() for r in results])
  if method == 'autoregressive':
    assert (nothing == trace_lib.NOTHING).all()
    return
  traces = [r['trace'] for r in results]
  dropped = [
    t.canvas[~t.final & (t.canvas != trace_lib.NOTHING)] for t in traces
  ]
  kept = sum((t.final[:, 1:]).sum() for t in traces)
  assert kept and sum(map(len, dropped)), 'drafts of both kinds'
  broken = results[0] | dict(tokens=results[0]['tokens'][::-1])
  with pytest.raises(AssertionError):
    _check(broken)


def test_what_a_stop_string_leaves():
  """Calls behind the text are in the trace, as in `calls`."""
  made = module_cases.generator('F')
  one = made.generate(PROMPTS[:1], trace=True, max_new_tokens=40,
                      **GREEDY)[0]  # fmt: skip
  stop = one['text'][4:6]
  cut = made.generate(
    PROMPTS[:1], trace=True, stop=(stop,), max_new_tokens=40,
    **GREEDY,
  )[0]  # fmt: skip
  assert cut['finish'] == 'stop' and cut['trace'].calls == cut['calls']
  assert len(cut['tokens']) <= cut['calls'] < one['calls']


def test_requests_have_none():
  with support.refused('decode.requests=2', 'requests=0'):
    module_cases.generator('F').generate(
      PROMPTS, trace=True, requests=2, max_new_tokens=4
    )


def test_a_trace_is_printed_as_lists():
  result = module_cases.generator('F').generate(
    PROMPTS[:1], trace=True, max_new_tokens=6, **LOOKUP
  )[0]
  listed = json.loads(json.dumps(result['trace'].listed()))
  assert len(listed) == result['calls']
  assert list(listed[0]) == list(trace_lib.Trace._fields[:-1])
  made = [
    t
    for call in listed
    for t, f in zip(call['tokens'], call['final'], strict=True)
    if f
  ]
  assert made == result['tokens'][1:]
