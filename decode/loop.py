"""From prompts to text: one prefill, then one compiled loop for all tokens.

The loop (program.py) returns to the host every `CHUNK` tokens when streaming or
looking for stop strings, when a row ends that another prompt waits for, else
once. `limit` and the sampling values are
arguments: all chunks, seeds and temperatures run the same program. Prompt
lengths and token counts are rounded up to buckets, so few programs are
compiled. The host raises an error for a row whose logits were not finite.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import plain_files
from paraxis.decode import methods
from paraxis.decode import program
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import scheduler
from paraxis.decode import shared_rows
from paraxis.decode import step
from paraxis.decode import transcript
from paraxis.decode import weights
from paraxis.decode.drafts import heads
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import side
from paraxis.sharding import annotate
from paraxis.sharding.meter import compiling

CHUNK = 16  # tokens between two looks of the host


def bucket(n):
  """n rounded up to a multiple of 16 or, if larger, of its leading quarter."""
  unit = max(16, 2 ** (max(n - 1, 1).bit_length() - 3))
  return -(-n // unit) * unit


def _say(line):
  print(f'paraxis: {line}', file=sys.stderr)


def end_ids(tokenizer):
  try:
    return (tokenizer.end_id,)
  except errors.UserError:
    return ()  # a vocabulary without an end token: rows run to their limit


class Generator:
  """Continues prompts with one model on one mesh.

  A compiled program is kept per (rows, prompt bucket, token bucket, filters).
  """

  def __init__(
    self, built, params, tokenizer, config, say=_say, ends=(), begins=True
  ):
    """Lays the parameters out for decoding.

    Args:
      built: models.build.Built.
      params: {path: array} as `Decoder.init` gives them, on the mesh.
      tokenizer: models.tokenizer; its ids must be below model.vocab_size.
      config: configs.schema.Decode, the defaults of `generate`.
      say: prints one line.
      ends: ids that end a row, beside the tokenizer's end token.
      begins: whether the model has seen the token that a document begins with.
        Where masks are predicted where they are it has not
        (train/data/objectives.py), and prompts are without.

    Raises:
      UserError: the tokenizer has more entries than the embedding; the model
        has a side network.
    """
    self.built, self.tokenizer, self.config = built, tokenizer, config
    self._model, self._say, self.begins = built.model, say, begins
    side.check_decoding(self._model)
    vocab = self._model.config.vocab_size
    if tokenizer.vocab_size > vocab:
      raise errors.UserError(
        f'tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, '
        f'the model has model.vocab_size={vocab}: they do not belong '
        'together.'
      )
    self._ends = (*end_ids(tokenizer), *ends)
    jit = compiling.jit_for(self._model.config.dtype)
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
    self._scheduler = functools.cache(
      functools.partial(scheduler.Scheduler, self._model)
    )
    self._draft = functools.cache(self._read_draft)

  def replace(self, params):
    """Takes other parameters, {path: array} as `Decoder.init` gives them;
    compiled programs stay."""
    with build.use(self.built):
      self._params = self._ready(params)

  @property
  def params(self):
    """{path: array}, one a layer, as decoding reads them."""
    return self._params

  def _prepare(self, params):
    """One array per layer; what every use casts is cast once, here."""
    return weights.prepare(self._model, params, self.config)

  def _read_draft(self, path, stamp):
    """(heads.About or None, its arrays on the mesh) of decode.draft."""
    del stamp  # of the key alone: a draft may be trained anew
    if not path:
      return None, ()
    about, arrays = heads.load(
      path, self._model.config, self.tokenizer.fingerprint
    )
    methods.check_arrays(self._model, path, about, arrays)
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
        (scheduler.py, shared_rows.py). weights and weight_group cannot change.

    Returns:
      list of dict: prompt, text, tokens (ids of the text), logprobs (natural,
      of the model, before temperature and filters), finish: 'length', 'end'
      (end token) or 'stop' (stop string), calls: of the model after the prompt,
      rejected and unread tokens included; lengths: how many of them made 0, 1,
      .. tokens; forwards: of what drafts; with `trace` a trace.Trace of calls.

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
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
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
        forwards=methods.forwards(config) * sum(lengths),
      )  # fmt: skip
      if record:
        results[i]['trace'] = record
      if on_end:
        on_end(i, results[i])

    hooks = transcript.Hooks(on_text, ended, bool(on_text or on_end or stop))
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

  def _programs(self, ids, config, sampled):
    """(start, run, T): program.Program's functions of a prompt, and of a state
    and an Until; and the tokens that prompts are padded to.

    sampled: form and values of sampling.check, whether calls are recorded.
    """
    form, values, trace = sampled
    about, own = self._draft(config.draft, plain_files.stamp(config.draft))
    method = self._method(methods.Choice.of(config), about)
    params = proposal.Params(self._params, own)
    static = program.Static(form, config.judge, trace)
    # A row holds all that a call feeds, however few tokens are asked.
    least = max(method.lane, method.tree.width + 1)
    slots, length = self._fit(ids, config, least)
    limit = config.max_new_tokens
    room = slots, min(bucket(limit), slots - length)

    def start(prompt):
      given = params, prompt, values, np.int32(limit)
      return self._start(*given, method, static, room)

    def run(state, until):
      return self._run(params, state, values, until, method, static)

    return start, run, length

  def _together(self, ids, rows, config, sampled, hooks):
    """A row for each prompt, all at once.

    Args:
      ids: of the prompts. rows: transcript.Transcript of each, which it fills.
      sampled: as for `_programs`. hooks: transcript.Hooks.
    """
    start, run, length = self._programs(ids, config, sampled)
    limit = config.max_new_tokens
    prompt = self._place(ids, length)
    state, seen = start(prompt)
    made = _read(seen, rows, [0] * len(rows), hooks)
    chunk = CHUNK if hooks.often else limit
    while least := [n for n, r in zip(made, rows, strict=True) if not r.finish]:
      ended = [bool(r.finish) for r in rows]
      ended += [True] * (len(prompt[0]) - len(rows))
      until = program.Until(
        np.int32(min(limit, min(least) + chunk)),
        step.put(np.array(ended), self.built.mesh),
        np.bool_(False),
        np.int32(limit),
      )
      state, seen = run(state, until)
      made = _read(seen, rows, made, hooks)

  def _serve(self, ids, rows, config, sampled, hooks):
    """`_together` by continuous batching (scheduler.py, shared_rows.py)."""
    count, limit = config.requests, config.max_new_tokens
    shards, chunks = annotate.shards('batch'), config.method == 'autoregressive'
    if not chunks and count % shards:
      raise errors.UserError(
        f'decode.requests={count} rows on {shards} batch shards: take a '
        f'multiple of {shards}, or another mesh.'
      )
    if len(ids) > count:
      self._say(
        f'{len(ids)} prompts for {count} rows (decode.requests): '
        f'{len(ids) - count} wait'
      )
    if chunks:
      self._serve_chunks(ids, rows, config, sampled, hooks)
      return
    start, run, length = self._programs(ids, config, sampled)
    chunk = CHUNK if hooks.often else limit
    given = count, config.budget, length, limit, chunk, shards
    sizes = shared_rows.Sizes(*given)
    requests, mesh = (ids, rows), self.built.mesh
    shared_rows.serve(start, run, requests, sizes, hooks, mesh)

  def _serve_chunks(self, ids, rows, config, sampled, hooks):
    """`_serve` of one token a call, with prompts in chunks beside them."""
    about, _ = self._draft(config.draft, plain_files.stamp(config.draft))
    self._method(methods.Choice.of(config), about)  # refuses as `_programs`
    form, values, _ = sampled
    slots, _ = self._fit(ids, config)
    lanes = config.budget // scheduler.CHUNK
    served = self._scheduler(config.requests, lanes)
    requests = [
      scheduler.Request(i, prompt, row)
      for i, (prompt, row) in enumerate(zip(ids, rows, strict=True))
    ]
    end = lambda request: hooks.ended(request.number, [0, request.steps])
    given = self._params, requests, slots, form, values
    served.serve(*given, hooks.on_text, end)

  def _encode(self, prompts, domains):
    """Token ids of every prompt, checked."""
    if not prompts:
      raise errors.UserError('there is no prompt to continue.')
    if isinstance(prompts, str):
      raise errors.UserError('prompts is one text: give a list of texts.')
    if len(domains) != len(prompts):
      raise errors.UserError(
        f'{len(domains)} domains for {len(prompts)} prompts: give one each.'
      )
    vocab, out = self._model.config.vocab_size, []
    for i, (prompt, domain) in enumerate(zip(prompts, domains, strict=True)):
      if isinstance(prompt, str):
        if domain is not None:
          self.require_domain(domain)
        first = self.tokenizer.opening(domain) if self.begins else []
        prompt = [*first, *self.tokenizer.encode(prompt)]
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

  def require_domain(self, domain):
    """UserError unless a text may begin as those of a domain do."""
    if not self.begins:
      raise errors.UserError(
        f'domain {domain!r} is told by the first token of a document, which '
        'this model of masks never reads (train.objective, with model.'
        'mask_shift=False): leave out the domain.'
      )
    self.tokenizer.require_domain(domain)

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
    slots = max(min(length + bucket(new), most), least)
    return step.slots(slots), length

  def _place(self, ids, length):
    """As step.place, and the number of each row; reports the empty rows."""
    tokens_BT, lengths_B = step.place(ids, length, self.built.mesh)
    number_B = np.arange(len(lengths_B), dtype=np.uint32)
    empty = len(lengths_B) - len(ids)
    if empty:
      self._say(
        f'{annotate.shards("batch")} batch shards, prompts: {len(ids)}, empty '
        f'rows added: {empty}'
      )
    return tokens_BT, lengths_B, step.put(number_B, self.built.mesh)


def _read(seen, rows, before, hooks):
  """transcript.read, which raises IntegrityError for a row's bad logits."""
  made, bad = transcript.read(jax.device_get(seen), rows, before, hooks)
  transcript.check_sound(bad, len(rows), 'row')
  return made
