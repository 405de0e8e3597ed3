"""From prompts to text: one prefill, then one compiled loop for all tokens.

The loop (program.py) returns to the host every `CHUNK` tokens when streaming or
looking for stop strings, else once. `limit` and the sampling values are
arguments: all chunks, seeds and temperatures run the same program. Prompt
lengths and token counts are rounded up to buckets, so few programs are
compiled. The host raises an error for a row whose logits were not finite.
"""

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import methods
from paraxis.decode import program
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import scheduler
from paraxis.decode import step
from paraxis.decode import transcript
from paraxis.decode import weights
from paraxis.decode.drafts import heads
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.sharding import annotate
from paraxis.sharding.meter import compiling

CHUNK = 16  # tokens between two looks of the host


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


class Hooks(NamedTuple):
  """What the host does with new tokens. on_text: of `generate`. ended: called
  as ended(row, calls that made 0, 1, .. tokens, trace.Trace or None). often:
  look for both every `CHUNK` tokens, not once."""

  on_text: Any
  ended: Any
  often: bool


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
    self._ready = jit(self._prepare)
    self.replace(params)
    made = program.Program(self._model, self._ends)
    self._start = jit(made.begin, static_argnames=('method', 'static', 'room'))
    self._run = jit(
      made.loop,
      static_argnames=('method', 'static'),
      donate_argnames=('state',),
    )
    # Programs are compiled for a method, the object.
    self._method = functools.cache(functools.partial(methods.of, self._model))
    self._draft = functools.cache(self._read_draft)

  def replace(self, params):
    """Takes other parameters, {path: array} as `Decoder.init` gives them;
    compiled programs stay."""
    with build.use(self.built):
      self._params = self._ready(params)
    self._scheduler = functools.cache(
      functools.partial(scheduler.Scheduler, self._model, self._params)
    )

  @property
  def params(self):
    """{path: array}, one a layer, as decoding reads them."""
    return self._params

  def _prepare(self, params):
    """One array per layer; what every use casts is cast once, here."""
    return weights.prepare(self._model, params, self.config)

  def _read_draft(self, path):
    """(heads.About or None, its arrays on the mesh) of decode.draft."""
    if not path:
      return None, ()
    about, arrays = heads.load(
      path, self._model.config, self.tokenizer.fingerprint
    )
    every = jax.NamedSharding(self.built.mesh, jax.P())
    return about, jax.device_put(arrays, every)

  def generate(
    self, prompts, domains=None, stop=(), on_text=None, on_end=None,
    trace: Any = False, **options,
  ) -> list[dict[str, Any]]:  # fmt: skip
    """Continues every prompt.

    Args:
      prompts: list of texts, each the beginning of a document, or of lists of
        token ids, taken as they are.
      domains: None, or one domain of the tokenizer (or None) per prompt.
      stop: strings that end a row; the text is cut before them.
      on_text: called as on_text(row, piece) with new text, about every 16
        tokens.
      on_end: called as on_end(row, result) when a row has ended, also looked
        for about every 16 tokens.
      trace: record every call.
      **options: fields of configs.schema.Decode that replace the defaults:
        max_new_tokens, temperature, top_k, top_p, min_p, seed; method, drafts,
        draft_layers, draft, judge (decode/methods.py); requests, budget
        (decode/scheduler.py). weights and weight_group cannot change.

    Returns:
      list of dict: prompt, text, tokens (ids of the text), logprobs (natural,
      of the model, before temperature and filters), finish: 'length', 'end'
      (end token) or 'stop' (stop string), calls: of the model after the prompt,
      rejected and unread tokens included; lengths: how many of them made 0, 1,
      .. tokens; with `trace` a trace.Trace of them, of NumPy arrays.

    Raises:
      UserError: an option out of range, an unknown domain, an id outside the
        vocabulary, or more tokens than the cache may hold; before compiling.
      IntegrityError: logits of a row are not finite; on_text was called with
        the text up to there.
    """
    config = self._with(options)
    weights.check_kept(self.config, config)
    form, values = sampling.check(config, self._model.config.vocab_size)
    run = self._serve if config.requests else self._together
    if trace and config.requests:
      raise errors.UserError(
        f'a trace is of rows of their own: decode.requests={config.requests} '
        'shares rows between prompts; take requests=0.'
      )
    if not all(stop):
      raise errors.UserError('an empty stop string would end all rows at once.')
    ids = self._encode(prompts, domains or [None] * len(prompts))
    limit = config.max_new_tokens
    rows = [
      transcript.Transcript(self.tokenizer, self._ends, limit, stop)
      for _ in prompts
    ]
    results: list[dict] = [{} for _ in prompts]

    def ended(i, lengths, record=None):
      r = rows[i]
      results[i] |= dict(
        prompt=prompts[i], text=r.text, tokens=r.tokens, logprobs=r.logprobs,
        finish=r.finish, calls=sum(lengths), lengths=lengths,
      )  # fmt: skip
      if record:
        results[i]['trace'] = record
      if on_end:
        on_end(i, results[i])

    hooks = Hooks(on_text, ended, bool(on_text or on_end or stop))
    with build.use(self.built):
      run(ids, rows, config, (form, values, trace), hooks)
    return results

  def refused(self, prompts, domains, **options):
    """{i: why} of the prompts that `generate` would refuse on their own."""
    made, bad = self._with(options), {}
    for i, pair in enumerate(zip(prompts, domains, strict=True)):
      try:
        self._fit(self._encode(*([x] for x in pair)), made)
      except errors.UserError as e:
        bad[i] = str(e).removeprefix('prompt 0: ')
    return bad

  def _with(self, options):
    """schema.Decode with some fields replaced."""
    return schema.view(
      {'decode': dataclasses.asdict(self.config) | options}
    ).decode

  def _together(self, ids, rows, config, sampled, hooks):
    """A row for each prompt, all at once.

    Args:
      ids: of the prompts. rows: transcript.Transcript of each, which it fills.
      sampled: form and values of sampling.check, whether calls are recorded.
      hooks: Hooks.
    """
    form, values, trace = sampled
    about, own = self._draft(config.draft)
    method = self._method(methods.Choice.of(config), about)
    params = proposal.Params(self._params, own)
    static = program.Static(form, config.judge, trace)
    slots, length = self._fit(ids, config, method.lane)
    limit = config.max_new_tokens
    tokens_BT, lengths_B = self._place(ids, length)
    new = min(bucket(limit), slots - length)
    state, seen = self._start(
      params, (tokens_BT, lengths_B), values, np.int32(limit), method, static,
      (slots, new),
    )  # fmt: skip
    made = _read(seen, rows, [0] * len(rows), hooks)
    chunk = CHUNK if hooks.often else limit
    while least := [n for n, r in zip(made, rows, strict=True) if not r.finish]:
      ended = [bool(r.finish) for r in rows]
      ended += [True] * (lengths_B.shape[0] - len(rows))
      state, seen = self._run(
        params,
        state,
        values,
        np.int32(min(limit, min(least) + chunk)),
        step.put(np.array(ended), self.built.mesh),
        method,
        static,
      )
      made = _read(seen, rows, made, hooks)

  def _serve(self, ids, rows, config, sampled, hooks):
    """`_together` by continuous batching (scheduler.py)."""
    form, values, _ = sampled
    if config.method != 'autoregressive':
      raise errors.UserError(
        f'decode.requests={config.requests} shares rows between prompts, which '
        f'decode.method={config.method} does not: take autoregressive, or '
        'requests=0.'
      )
    slots, _ = self._fit(ids, config)
    if len(ids) > config.requests:
      self._say(
        f'{len(ids)} prompts for {config.requests} rows (decode.requests): '
        f'{len(ids) - config.requests} wait'
      )
    lanes = config.budget // scheduler.CHUNK
    served = self._scheduler(config.requests, lanes)
    requests = [
      scheduler.Request(i, prompt, row)
      for i, (prompt, row) in enumerate(zip(ids, rows, strict=True))
    ]
    end = lambda request: hooks.ended(request.number, [0, request.steps])
    served.serve(requests, slots, form, values, hooks.on_text, end)

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
      if 0 <= (mask := self._model.config.mask_id) and mask in prompt:
        raise errors.UserError(
          f'prompt {i}: token id {mask} is model.mask_id, which stands for a '
          'token that is still to be made.'
        )
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

  def _fit(self, ids, config, least=0):
    """(cache slots, prompt bucket), or UserError with both numbers.

    Args:
      least: slots, however few tokens there are.
    """
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
    slots, shards = max(min(length + bucket(new), most), least), 1
    if self.built.mesh.shape.get('context', 1) > 1:
      shards = annotate.shards('slots')
    return -(-slots // shards) * shards, length

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


def _read(seen, rows, before, hooks):
  """Gives the rows their tokens from number before[row] on; -> [tokens made].

  IntegrityError, after that, if a row's logits were not finite before it ended.
  """
  tokens_BM, logprobs_BM, broken_B, made_B, lengths, trace = jax.device_get(
    seen
  )
  bad = []
  for i, row in enumerate(rows):
    if not row.finish:
      end = made_B[i]
      new = slice(before[i], end)
      row.extend(tokens_BM[i, new], logprobs_BM[i, new])
      if broken_B[i] >= 0 and not row.finish:
        row.finish = 'broken'
        bad.append((int(end), i))
      if hooks.on_text and (piece := row.fresh()):
        hooks.on_text(i, piece)
      if row.finish not in ('', 'broken'):
        record = trace and trace.of(i)
        hooks.ended(i, lengths[i].tolist(), record)
  if bad:
    at, row = min(bad)
    raise errors.IntegrityError(
      f'decoding: the logits of row {row} at step {at} are not finite (rows '
      f'and new tokens count from 0; {len(bad)} of {len(rows)} rows): the '
      'parameters are damaged, or numbers overflow in model.dtype.'
    )
  return made_B[: len(rows)].tolist()
