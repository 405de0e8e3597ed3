"""Masked models decode as a loop over rows, blocks and calls without a cache.

Legend: B rows, T tokens, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support
import unmask_cases

from paraxis.configs import schema
from paraxis.configs.base import decode as fields
from paraxis.decode import __main__ as command
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.decode import trace as trace_lib
from paraxis.decode.certify import cases
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads
from paraxis.decode.evaluate import score
from paraxis.decode.unmask import canvas
from paraxis.decode.unmask import filters
from paraxis.models import batch as batch_lib
from paraxis.train import draft

pytestmark = pytest.mark.usefixtures('float64')

V, MASK = 12, 11
SPREAD = 1.2  # of parameters: texts are no repetitions of a token
FORMS = {
  'full': dict(visibility='full'),
  'block': dict(visibility='block', block=4),
}
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5] * 4, [7]]
POLICIES = {
  'one': {},
  'three': dict(tokens=3, score='margin'),
  'threshold': dict(count='threshold', threshold=0.25),
  'hierarchy': dict(count='hierarchy', threshold=0.4, score='entropy'),
  'ascending': dict(count='ascending'),
  'credit': dict(count='threshold', threshold=0.4, credit_weight=1.5),
  'filter': dict(score='filter', count='threshold', threshold=0.5),
}


FILTER = filters.initial(4, seed=1)


@pytest.fixture
def options(policy, tmp_path):
  """Of a policy, for `generate`; the filter's with its file."""
  given = dict(unmask=dict(block=4) | POLICIES[policy])
  if policy != 'filter':
    return given
  about = heads.About('filter', 0, (V, 16, 2), 'numbers', ((0.5,),) * 4)
  heads.save(tmp_path / 'filter.npz', about, FILTER)
  return given | dict(draft=str(tmp_path / 'filter.npz'))


@functools.cache
def generator(form, shift=False, mesh='', devices=1, end_id=-1):
  """loop.Generator of a small masked model with random parameters."""
  model = dict(
    vocab_size=V, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16,
    pattern='F', num_layers=2, attention_block=8, dtype='float64',
    param_dtype='float64', tied_embedding=False, mask_id=MASK,
    mask_shift=shift, **FORMS[form],
  )  # fmt: skip
  config = schema.view(dict(model=model, mesh=dict(sequence=False)))
  built = load.built_for(config, mesh, jax.devices()[:devices])
  values = module_cases.parameters(built.model, SPREAD)
  params = module_cases.placed(built, values)
  numbers = module_cases.Numbers(V, end_id)
  decode = schema.Decode(max_new_tokens=14, temperature=0.0, method='unmask')
  return loop.Generator(built, params, numbers, decode, lambda line: None)


def _logits(form, shift):
  """tokens of a row -> z (T, V), of one pass over all of it."""
  model = generator(form, shift).built.model
  params = module_cases.parameters(model, SPREAD)

  @jax.jit
  def run(params, tokens):
    ones = np.ones((1, len(tokens)), np.int32)
    places = ones.cumsum(1) - 1
    batch = batch_lib.Batch(tokens[None], None, ones, places, None, None)
    return model.logits(params, model.features(params, batch)[0])[0]

  return lambda tokens: np.array(run(params, np.array(tokens, np.int32)))


def plain(form, shift, prompt, policy, new=14):
  """(tokens, logprobs, [tokens that each call made], canvases before)."""
  logits, width = _logits(form, shift), 4
  row, end = list(prompt) + [MASK] * new, len(prompt) + new
  at = len(prompt) // 4 * 4 if form == 'block' else len(prompt)
  found, counts, canvases = {}, [], []
  while at < end:
    stop, call = min(at + width, end), 0
    credit = np.zeros((width, V))
    while masks := [c for c in range(at, stop) if row[c] == MASK]:
      z = logits(row[: stop if form == 'block' else end])
      z[:, MASK] = -np.inf
      z = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1))[:, None]
      z -= z.max(1, keepdims=True)
      z -= np.log(np.exp(z).sum(1, keepdims=True))
      z = {c: z[c - shift] for c in masks}
      said = z if not policy.credit_weight else {
        c: unmask_cases.credited(policy, z[c], credit[c - at]) for c in masks
      }  # fmt: skip
      token = {c: int(said[c].argmax()) for c in masks}
      score = {
        c: unmask_cases.score(policy.score, said[c], token[c]) for c in masks
      }
      if policy.score == 'filter':
        held = [score.get(c, 1.0) for c in range(at, at + width)]
        score = dict(enumerate(unmask_cases.filtered(FILTER, held), at))
      canvases.append([-1 if c in masks else row[c] for c in range(at, stop)])
      taken = unmask_cases.chosen(policy, score, masks, call)
      for c in taken:
        row[c], found[c] = token[c], z[c][token[c]]
      counts.append(len(taken))
      call += 1
    if form == 'block' and stop < end:
      counts.append(0)  # read once more for the cache
      canvases.append(row[at:stop])
    at += width
  places = range(len(prompt), end)
  return row[len(prompt) :], [found[c] for c in places], counts, canvases


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('shift', [False, True], ids=['here', 'shift'])
@pytest.mark.parametrize('form', FORMS)
def test_text_calls_and_trace_are_those_of_a_plain_loop(form, shift, options):
  results = generator(form, shift).generate(PROMPTS, trace=True, **options)
  for prompt, result in zip(PROMPTS, results, strict=True):
    tokens, logprobs, counts, canvases = plain(
      form, shift, prompt, fields.Unmask(**options['unmask'])
    )
    assert result['tokens'] == tokens
    np.testing.assert_allclose(result['logprobs'], logprobs, atol=1e-5)
    assert result['calls'] == len(counts)
    assert result['lengths'] == np.bincount(counts, minlength=5).tolist()
    trace = result['trace']
    assert trace.final.sum(1).tolist() == counts
    for before, want in zip(trace.canvas, canvases, strict=True):
      assert before[: len(want)].tolist() == want
  assert len({tuple(r['tokens']) for r in results}) == 3


def test_two_policies_make_two_texts():
  """Else the comparison above could not tell them apart."""
  found = [
    generator('full').generate(PROMPTS, unmask=dict(block=4) | given)
    for name, given in POLICIES.items()
    if name != 'filter'
  ]
  assert len({str([r['tokens'] for r in x]) for x in found}) > 2
  assert len({x[0]['calls'] for x in found}) > 2


@pytest.mark.parametrize('form', FORMS)
def test_a_mesh_changes_nothing(form):
  options = dict(unmask=dict(block=4, tokens=2), temperature=0.9, seed=5)
  one = generator(form).generate(PROMPTS, **options)
  many = generator(form, mesh='data=2,fsdp=2,tensor=2', devices=8)
  found = many.generate(PROMPTS, **options)
  assert [r['tokens'] for r in found] == [r['tokens'] for r in one]


@pytest.mark.parametrize('form', FORMS)
def test_a_row_does_not_depend_on_others(form):
  made = generator(form)
  options = dict(unmask=dict(block=4, score='random'), temperature=0.9, seed=5)
  every = made.generate(PROMPTS, **options)
  alone = made.generate(PROMPTS[:1], **options)
  assert alone[0]['tokens'] == every[0]['tokens']
  other = made.generate(PROMPTS, **options | dict(seed=6))
  assert [r['tokens'] for r in other] != [r['tokens'] for r in every]
  longer = made.generate(PROMPTS + [[1] * 30], **options)
  assert longer[0]['tokens'] == every[0]['tokens']


@pytest.mark.parametrize('form', FORMS)
def test_an_end_token_ends_a_row(form):
  text = generator(form).generate(PROMPTS)[0]['tokens']
  end = text[5]
  at = text.index(end)
  found = generator(form, end_id=end).generate(PROMPTS)[0]
  assert (found['tokens'], found['finish']) == (text[:at], 'end')


def test_text_comes_by_blocks():
  pieces = []
  results = generator('full').generate(
    PROMPTS, max_new_tokens=40, unmask=dict(block=8),
    on_text=lambda row, piece: pieces.append((row, piece)),
  )  # fmt: skip
  for row, result in enumerate(results):
    own = [piece for r, piece in pieces if r == row]
    assert ''.join(own) == result['text'] and len(own) > 1


def test_credit_saves_calls_or_none():
  """A weight of 0 is the threshold alone; more of it ends a canvas sooner."""
  made = generator('full')
  run = lambda **given: made.generate(
    PROMPTS, unmask=dict(block=8, count='threshold', threshold=0.6, **given)
  )
  plain_, none = run(), run(credit_decay=0.1, credit_power=0.9)
  assert [r['tokens'] for r in plain_] == [r['tokens'] for r in none]
  some = run(credit_weight=3.0)
  assert sum(r['calls'] for r in some) < sum(r['calls'] for r in plain_)


def test_numbers_that_are_not_finite_end_a_row():
  made = generator('full')
  damaged = dict(made.params)
  params = jax.tree.map(lambda x: x * np.nan, damaged)
  old, made._params = made._params, params
  try:
    with pytest.raises(loop.errors.IntegrityError, match='row 0 at step 0'):
      made.generate(PROMPTS)
  finally:
    made._params = old


def test_a_filter_is_of_its_canvas(tmp_path):
  made, path = generator('full'), str(tmp_path / 'filter.npz')
  run = lambda width=4, file=path, **policy: made.generate(
    PROMPTS, draft=file, unmask=dict(block=width) | policy
  )
  with support.refused('score=filter', 'decode.draft'):
    run(file='', score='filter')
  about = heads.About('filter', 0, (V, 16, 2), 'numbers', ((0.5,),) * 4)
  heads.save(path, about, FILTER)
  with support.refused('canvases of 4 tokens', 'they have 8'):
    run(8, score='filter')
  with support.refused('credit_weight=1 changes', 'a filter'):
    run(score='filter', credit_weight=1.0)
  with support.refused('score=margin', 'leave out decode.draft'):
    run(score='margin')
  other = dataclasses.replace(about, tokenizer='other')
  heads.save(tmp_path / 'other.npz', other, FILTER)
  with support.refused('another tokenizer', 'another model'):
    run(file=str(tmp_path / 'other.npz'), score='filter')


@pytest.fixture
def oracle(monkeypatch):
  """-> (texts (N, S)): a filter that knows from then on which draws are the
  texts'."""

  def use(texts):
    wanted = jnp.pad(jnp.asarray(texts), ((0, 0), (0, 4)))
    drawn, hits = canvas.Unmask._drawn, []

    def seen(self, z, own, draws):
      tokens, noise = drawn(self, z, own, draws)
      hits.append(tokens == canvas.window(wanted, own.at, self.width))
      return tokens, noise

    knows = lambda own, c, masks: hits.pop().astype(jnp.float32)
    monkeypatch.setattr(canvas.Unmask, '_drawn', seen)
    monkeypatch.setattr(filters, 'score', knows)

  return use


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('policy', ['filter'])
def test_a_filter_that_knows_the_end_takes_the_calls_of_the_oracle(
  form, options, oracle
):
  """But where no draw is right: it takes one, where the oracle is told."""
  made = generator.__wrapped__(form)  # nothing that it compiles is kept
  prompts = np.random.default_rng(3).integers(0, MASK, (8, 4)).tolist()
  plainly = made.generate(prompts, unmask=dict(block=4))
  texts = np.append(prompts, [r['tokens'] for r in plainly], 1)
  logits, fewer = _logits(form, False), 0

  def read(rows):
    z = np.stack([logits(x) for x in rows])
    z[..., MASK] = -np.inf
    return z.argmax(-1), np.asarray(jax.nn.softmax(z).max(-1))

  oracle(texts)
  results = made.generate(prompts, **options)
  for text, result in zip(texts, results, strict=True):
    calls, records = filters.guided(read, text[None], 4, 4, MASK)
    if records.right.any(1).all():
      commits = 3 if form == 'block' else 0  # of 14 tokens
      assert result['calls'] == calls[0] + commits
      assert result['tokens'] == text[4:].tolist()
      fewer += calls[0] < 10
  assert fewer >= 5


def test_an_end_without_weight_comes_last():
  """It cuts the text where it is drawn: in the first call, or in the last."""
  text = generator('full').generate(PROMPTS)[0]['tokens']
  made = generator('full', end_id=text[5])
  run = lambda weight: made.generate(
    PROMPTS[:1], trace=True, unmask=dict(block=14, end_weight=weight)
  )[0]['trace']  # fmt: skip
  for weight in (0.0, 1.0):
    trace = run(weight)
    end = (trace.tokens == text[5]) & trace.final
    others = (trace.canvas == trace_lib.NOTHING) & (trace.tokens != text[5])
    early = end.any(1) & others.any(1)
    assert early.any() == (weight == 1), (weight, end)


@pytest.mark.parametrize('method, form, words', [
  ('autoregressive', 'full', 'take decode.method=unmask'),
  ('prompt_lookup', 'block', 'visibility=block sees those behind it'),
])  # fmt: skip
def test_masked_models_do_not_draft(method, form, words):
  with support.refused(f'decode.method={method}', words):
    generator(form).generate(PROMPTS, method=method)
  with support.refused(f'decode.method={method}', words):
    generator(form).generate(PROMPTS, method=method, requests=2)


def test_causal_models_fill_no_masks():
  with support.refused('decode.method=unmask', 'no model of masks'):
    module_cases.generator('F').generate(PROMPTS, method='unmask')


@pytest.mark.parametrize(
  'what', ['paraxis evaluate', 'paraxis draft', '--certify']
)
def test_what_goes_from_left_to_right_is_refused(what):
  made = generator('full')
  with support.refused(what, 'model.visibility=full sees those behind it'):
    if what == '--certify':
      cases.small('F', {'model.visibility': 'full'})
    elif what == 'paraxis draft':
      draft.trained(
        made, draft.Text('', 1), 'medusa', 0, distill.Recipe(), print
      )
    else:
      parts = made.built, made.params, made.tokenizer, ()
      score.Scorer(parts, made.config, 16)


def test_a_prompt_has_no_masks():
  with support.refused(f'prompt 1: token id {MASK}', 'model.mask_id'):
    generator('full').generate([[1, 2], [1, MASK, 3]])


@pytest.mark.parametrize('form', FORMS)
def test_requests_share_rows(form):
  """A canvas that takes the row of another has nothing of it."""
  made, texts = generator(form), [*PROMPTS, [2, 3], [8] * 20]
  given = dict(temperature=1.0, seed=4, unmask=dict(block=4, tokens=2))
  want = made.generate(texts, **given)
  found = made.generate(texts, requests=3, budget=64, **given)  # by two
  for a, b in zip(found, want, strict=True):
    assert (a['tokens'], a['lengths']) == (b['tokens'], b['lengths'])


def test_trace_of_a_canvas_has_nothing_where_masks_are():
  result = generator('full').generate(PROMPTS, trace=True)[0]
  first = result['trace'].canvas[0][:14]
  assert (first == trace_lib.NOTHING).all()
  assert MASK not in result['tokens']


def test_the_command_lists_it(capsys):
  assert command.main(['--methods']) == 0
  assert 'unmask' in capsys.readouterr().out
