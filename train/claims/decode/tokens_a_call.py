"""Claims about tokens a call of the model, on real weights and real text.

The model is SmolLM2-135M (paraxis[smollm2]), in float32. Drafts are trained on
the training part of the shipped text, prompts are of its held-out part. Tokens
a call are counted, the first token of a prompt, which its reading makes, apart;
no time is: what a call costs with its drafts is `paraxis bench decode`.
"""

import jax.numpy as jnp

from paraxis.decode import methods
from paraxis.decode.drafts import copying
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import real_model


def on_real_text(run, *, method, draft, prompts, domains, at_least):
  """LEARN: tokens a call of a method, greedy and drawn, on held-out prompts.

  Args:
    method: fields of schema.Decode. draft: of `trained`; {}: none.
    prompts: [how many, tokens of each, new tokens]. domains: of the prompts;
      []: all.
    at_least: tokens a call, greedy, of one by one's texts but for ties.
  """
  return _on_real_text(run, method, draft, prompts, domains, at_least)[0]


def _on_real_text(run, method, draft, prompts, domains, at_least):
  """(what `on_real_text` finds, its tokens a call before they are rounded)."""
  (rows, length, new), given, about = prompts, dict(method), None
  if draft:
    kind = methods.FILES[method['method']]
    given['draft'], about, size = real_model.trained(run, kind, draft)
  ids = real_model.beginnings(
    real_model.model().tokenizer, rows, length, domains
  )
  greedy, drawn = dict(temperature=0.0), dict(temperature=1.0, seed=1)
  wanted = real_model.model().generate(ids, max_new_tokens=new, **greedy)
  mean, lengths, texts = real_model.counted(given, ids, new, greedy)
  same = real_model.same(wanted, texts)
  sampled, more, _ = real_model.counted(given, ids, new, drawn)
  name = '-'.join([method['method'], *domains])
  real_model.show(dict(greedy=lengths, drawn=more), run, name)
  text = f'{len(ids)} held-out prompts of {length} tokens, {new} new ones each'
  text += f'; drawn at temperature 1: {sampled:.2f}; greedy texts of '
  text += f'{real_model.said(same)} of {len(ids)} are those of one by one'
  if about:
    text += f'; {size:,} trained parameters, first choices right: '
    text += ' '.join(f'{a[0]:.2f}' for a in about.accuracy)
  sound = bool(mean > 1 and sum(same) == len(ids))
  found = claims.Outcome(
    f'>= {at_least:.2f} tokens a call', f'{mean:.2f}', text,
    bool(mean >= at_least and sound), sound=sound,
  )  # fmt: skip
  return found, mean


def by_few_numbers(
  run, *, method, draft, prompts, domains, at_least, share_at_most
):
  """LEARN: `on_real_text`, and more than with parameters as they begin.

  Args:
    method, draft, prompts, domains, at_least: as there; domains: [].
    share_at_most: trained parameters over the model's.
  """
  found, mean = _on_real_text(run, method, draft, prompts, domains, at_least)
  kind = methods.FILES[method['method']]
  share = real_model.trained(run, kind, draft)[2] / real_model.parameters()
  begun, *_ = real_model.greedy(
    run, method=method, draft=draft | dict(rate=0.0, steps=1), prompts=prompts,
    name=f'{kind}-begun',
  )  # fmt: skip
  fits = share <= share_at_most and mean > begun
  return found._replace(
    expected=f'{found.expected}, <= {share_at_most:.3%} of the parameters, '
    'more than untrained',
    measured=f'{found.measured}, {share:.4%}, untrained {begun:.2f}',
    passed=bool(found.passed and fits),
  )


def more_than(run, *, pair, drafts, prompts, parameters_within):
  """LEARN: the first method makes more tokens a call than the second, of the
  same text.

  Args:
    pair: two dicts of fields of schema.Decode. drafts: of each. prompts: as
      for `on_real_text`. parameters_within: how far the numbers of trained
      parameters may be apart, as a ratio.
  """
  found, sizes, same, tables = [], [], [], {}
  wanted = real_model.one_by_one(prompts)
  for method, draft in zip(pair, drafts, strict=True):
    mean, lengths, made = real_model.greedy(
      run, method=method, draft=draft, prompts=prompts
    )
    found.append(mean)
    tables[method['method']] = lengths
    same.append(real_model.same(wanted, made))
    sizes.append(
      real_model.trained(run, methods.FILES[method['method']], draft)[2]
    )
  names = [m['method'] for m in pair]
  real_model.show(tables, run, '-'.join(names))
  near = max(sizes) / min(sizes) <= parameters_within
  ours = all(sum(x) == len(wanted) for x in same)
  sound = bool(near and ours and min(found) > 1)
  return claims.Outcome(
    f'{names[0]} > {names[1]}',
    f'{found[0]:.2f} {found[1]:.2f}',
    f'tokens a call, greedy, {prompts[0]} held-out prompts, {prompts[2]} new '
    f'tokens, {" and ".join(map(real_model.said, same))} texts are those of '
    f'one by one; trained parameters {sizes[0]:,} and {sizes[1]:,}'
    + ('' if near else f', which are NOT within {parameters_within:g}'),
    bool(found[0] > found[1] and sound),
    sound=sound,
  )


# ------------------------------------------------------------------ knock-outs


def any_place():
  """Knock-out: a lookup copies from the beginning of the text."""

  def wrong(width, text_S, length):
    order = jnp.arange(width, dtype=jnp.int32)
    return text_S[order], order < length

  return knockouts.patched(copying, '_found', wrong)
