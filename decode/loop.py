"""From prompts to text: one prefill, then one compiled loop for all tokens.

    state = start(prompts)                             first token
    while made < limit and not all done:               on the device
      logits, cache = advance(last token)
      token = sample(logits)

The loop returns to the host every `CHUNK` tokens when streaming or looking for
stop strings, else once. `limit` and the sampling values are arguments: all
chunks, seeds and temperatures run the same program. Prompt lengths and token
counts are rounded up to buckets, so few programs are compiled. A row whose
logits are not finite ends there, and the host raises an error for it: a token
drawn from NaN would look like any other.

Cost: each token reads every parameter and the row's cache once.
Legend: B rows, T prompt tokens, S cache slots, M new tokens, V vocabulary.
"""

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import transcript
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.sharding import annotate
from paraxis.sharding.meter import compiling

CHUNK = 16  # tokens between two looks of the host


class DecodeState(NamedTuple):
  """The loop's carry.

  cache: decoder.Cache. token: (B,) int32, last tokens, which are not yet in the
  cache. done: (B,) rows that have ended. broken: (B,) int32, number
  of the new token whose logits were not finite, -1: none. made: () tokens made
  per row. tokens: (B, M) int32, -1 where a row had ended. logprobs: (B, M)
  float32.
  """

  cache: Any
  token: Any
  done: Any
  broken: Any
  made: Any
  tokens: Any
  logprobs: Any


def bucket(n):
  """n rounded up to a multiple of 16 or, if larger, of its leading quarter."""
  unit = max(16, 2 ** (max(n - 1, 1).bit_length() - 3))
  return -(-n // unit) * unit


def _say(line):
  print(f'paraxis: {line}', file=sys.stderr)


def _ends(tokenizer):
  try:
    return (tokenizer.end_id,)
  except errors.UserError:
    return ()  # a vocabulary without an end token: rows run to their limit


class Generator:
  """Continues prompts with one model on one mesh.

  A compiled program is kept per (rows, prompt bucket, token bucket, filters).
  """

  def __init__(self, built, params, tokenizer, config, say=_say, ends=()):
    """Lays the parameters out for decoding.

    Args:
      built: models.build.Built.
      params: {path: array} as `Decoder.init` gives them, on the mesh.
      tokenizer: models.tokenizer; its ids must be below model.vocab_size.
      config: configs.schema.Decode, the defaults of `generate`.
      say: prints one line.
      ends: ids that end a row, beside the tokenizer's end token.

    Raises:
      UserError: the tokenizer has more entries than the embedding.
    """
    self.built, self.tokenizer, self.config = built, tokenizer, config
    self._model, self._say = built.model, say
    vocab = self._model.config.vocab_size
    if tokenizer.vocab_size > vocab:
      raise errors.UserError(
        f'tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, '
        f'the model has model.vocab_size={vocab}: they do not belong '
        'together.'
      )
    self._ends = (*_ends(tokenizer), *ends)
    jit = functools.partial(jax.jit, compiler_options=compiling.options())
    with build.use(built):
      self._params = jit(self._prepare)(params)
    self._start = jit(self._begin, static_argnames=('form', 'slots', 'new'))
    self._run = jit(
      self._loop, static_argnames=('form',), donate_argnames=('state',)
    )

  def _prepare(self, params):
    """One array per layer; what every use casts is cast once, here."""
    model, dtype = self._model, jnp.dtype(self._model.config.dtype)
    cast = {
      p: v if model.kinds[p] == 'vector' else v.astype(dtype)
      for p, v in params.items()
    }
    return model.unstack(cast)

  def _begin(self, params, tokens_BT, lengths_B, values, form, slots, new):
    """Prefill and the first token -> (DecodeState, what the host reads)."""
    x, cache = step.prefill(self._model, params, tokens_BT, lengths_B, slots)
    logits = self._model.logits(params, step.last(x, lengths_B))[:, 0]
    rows = tokens_BT.shape[0]
    fill = lambda value, dtype: annotate.put(
      jnp.full((rows, new), value, dtype), ('batch', None)
    )
    empty = DecodeState(
      cache,
      jnp.zeros_like(lengths_B),
      lengths_B == 0,
      jnp.full_like(lengths_B, -1),
      jnp.int32(0),
      fill(-1, jnp.int32),
      fill(0, jnp.float32),
    )
    state = self._take(empty, logits, values, form)
    return state, _for_host(state)

  def _take(self, state, logits_BV, values, form):
    """Draws every row's next token and writes it down."""
    z = annotate.put(logits_BV, sampling.ROWS)
    bad = ~state.done & ~jnp.all(jnp.isfinite(z), -1)
    rows = jnp.arange(len(z), dtype=jnp.uint32)
    index = jnp.full_like(rows, state.made)
    token, logprob = sampling.sample(z, form, values, rows, index)
    done = state.done | bad
    write = functools.partial(
      jax.lax.dynamic_update_slice_in_dim, start_index=state.made, axis=1
    )
    kept = jnp.where(done, -1, token)
    logprob = jnp.where(done, 0, logprob)
    return DecodeState(
      state.cache,
      jnp.where(done, 0, token),
      done | jnp.isin(token, jnp.asarray(self._ends, jnp.int32)),
      jnp.where(bad, state.made, state.broken),
      state.made + 1,
      write(state.tokens, kept[:, None]),
      write(state.logprobs, logprob[:, None]),
    )

  def _loop(self, params, state, values, limit, stopped_B, form):
    """Tokens until `limit` are made or every row has ended."""

    def more(state):
      return (state.made < limit) & ~jnp.all(state.done)

    def body(state):
      logits, cache = step.advance(
        self._model, params, state.cache, state.token, ~state.done
      )
      return self._take(state._replace(cache=cache), logits, values, form)

    state = state._replace(done=state.done | stopped_B)
    state = jax.lax.while_loop(more, body, state)
    return state, _for_host(state)

  def generate(self, prompts, domains=None, stop=(), on_text=None, **options):
    """Continues every prompt.

    Args:
      prompts: list of texts, each the beginning of a document, or of lists of
        token ids, taken as they are.
      domains: None, or one domain of the tokenizer (or None) per prompt.
      stop: strings that end a row; the text is cut before them.
      on_text: called as on_text(row, piece) with new text, about every 16
        tokens.
      **options: fields of configs.schema.Decode that replace the defaults:
        max_new_tokens, temperature, top_k, top_p, min_p, seed.

    Returns:
      list of dict: prompt, text, tokens (ids of the text), logprobs (natural,
      of the model, before temperature and filters), finish: 'length', 'end'
      (end token) or 'stop' (stop string).

    Raises:
      UserError: an option out of range, an unknown domain, an id outside the
        vocabulary, or more tokens than the cache may hold; before compiling.
      IntegrityError: logits of a row are not finite; on_text was called with
        the text up to there.
    """
    config = schema.view(
      {'decode': dataclasses.asdict(self.config) | options}
    ).decode
    form, values = sampling.check(config, self._model.config.vocab_size)
    if not all(stop):
      raise errors.UserError('an empty stop string would end all rows at once.')
    ids = self._encode(prompts, domains or [None] * len(prompts))
    slots, length = self._fit(ids, config)
    limit = config.max_new_tokens
    rows = [
      transcript.Transcript(self.tokenizer, self._ends, limit, stop)
      for _ in prompts
    ]
    with build.use(self.built):
      tokens_BT, lengths_B = self._place(ids, length)
      new = min(bucket(limit), slots - length)
      state, seen = self._start(
        self._params, tokens_BT, lengths_B, values, form, slots, new
      )
      made = _read(seen, rows, 0, on_text)
      chunk = CHUNK if stop or on_text else limit
      while made < limit and not all(r.finish for r in rows):
        ended = [bool(r.finish) for r in rows]
        ended += [True] * (lengths_B.shape[0] - len(rows))
        state, seen = self._run(
          self._params,
          state,
          values,
          np.int32(min(limit, made + chunk)),
          step.put(np.array(ended), self.built.mesh),
          form,
        )
        made = _read(seen, rows, made, on_text)
    return [
      dict(
        prompt=prompt,
        text=r.text,
        tokens=r.tokens,
        logprobs=r.logprobs,
        finish=r.finish,
      )
      for prompt, r in zip(prompts, rows, strict=True)
    ]

  def _encode(self, prompts, domains):
    """Token ids of every prompt, checked."""
    if not prompts:
      raise errors.UserError('there is no prompt to continue.')
    if len(domains) != len(prompts):
      raise errors.UserError(
        f'{len(domains)} domains for {len(prompts)} prompts: give one each.'
      )
    vocab, out = self._model.config.vocab_size, []
    for i, (prompt, domain) in enumerate(zip(prompts, domains, strict=True)):
      if isinstance(prompt, str):
        if domain is not None:
          self.tokenizer.require_domain(domain)
        prompt = [self.tokenizer.bos_id(domain), *self.tokenizer.encode(prompt)]
      bad = [t for t in prompt if not 0 <= t < vocab]
      if bad or not len(prompt):
        raise errors.UserError(
          f'prompt {i}: '
          + (
            f'token id {bad[0]} is outside the vocabulary of {vocab}.'
            if bad
            else 'no token to begin with.'
          )
        )
      out.append(list(map(int, prompt)))
    return out

  def _fit(self, ids, config):
    """(cache slots, prompt bucket), or UserError with both numbers."""
    longest, new = max(map(len, ids)), config.max_new_tokens
    most = config.cache_length
    if longest + new > most:
      raise errors.UserError(
        f'a prompt of {longest} tokens and {new} new ones are '
        f'{longest + new}, beyond decode.cache_length={most}: shorten the '
        'prompt, ask for fewer (max_new_tokens), or raise the limit.'
      )
    model_checks.check_length(
      self._model.config, longest + new, 'prompt and new tokens'
    )
    length = min(bucket(longest), most - new)
    return min(length + bucket(new), most), length

  def _place(self, ids, length):
    """As step.place; reports the empty rows."""
    tokens_BT, lengths_B = step.place(ids, length, self.built.mesh)
    empty = len(lengths_B) - len(ids)
    if empty:
      self._say(
        f'{annotate.shards("batch")} batch shards, prompts: {len(ids)}, empty '
        f'rows added: {empty}'
      )
    return tokens_BT, lengths_B


def _for_host(state):
  """Copies that every process can read: tokens, logprobs, broken, made."""
  whole = lambda x: annotate.put(x, (None,) * x.ndim)
  return *map(whole, (state.tokens, state.logprobs, state.broken)), state.made


def _read(seen, rows, before, on_text):
  """Gives the rows their tokens from number `before` on; -> tokens made.

  IntegrityError, after that, if a row's logits were not finite before it ended.
  """
  tokens_BM, logprobs_BM, broken_B, made = jax.device_get(seen)
  bad = []
  for i, row in enumerate(rows):
    if not row.finish:
      end = made if broken_B[i] < 0 else broken_B[i]
      row.extend(tokens_BM[i, before:end], logprobs_BM[i, before:end])
      if end < made and not row.finish:
        row.finish = 'broken'
        bad.append((int(end), i))
      if on_text and (piece := row.fresh()):
        on_text(i, piece)
  if bad:
    at, row = min(bad)
    raise errors.IntegrityError(
      f'decoding: the logits of row {row} at step {at} are not finite (rows '
      f'and new tokens count from 0; {len(bad)} of {len(rows)} rows): the '
      'parameters are damaged, or numbers overflow in model.dtype.'
    )
  return int(made)
