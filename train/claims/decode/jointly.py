"""Claims about drafts that learn together with their model (Medusa-2)."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode import loop
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads
from paraxis.decode.drafts import joint
from paraxis.models import build
from paraxis.train import draft
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.run import workdir as workdir_lib

BOTH, ALONE = 'heads and model', 'heads alone'


def more_tokens_a_call(
  run, *, fields, recipe, together, text, within, method, seeds
):
  """LEARN: heads that learn with their model make more tokens a call than heads
  of as many steps behind the frozen model, which stays as good as it was.

  Args:
    fields: {'section.field': value} of the model's training. recipe: fields of
      distill.Recipe, of the warm-up. together: fields of joint.Together; alone,
      heads have the steps of both.
    text: [tokens that all of them learn from, but for the last ones, `held` of
      the recipe, which shape the trees; held-out prompts, tokens of each, new
      tokens]. within: loss of held-out text over what it was.
    method: fields of schema.Decode.
  """
  config = experiment.fields(run.config, fields)
  together = joint.Together(**together)
  warm = distill.Recipe(**recipe)
  long = warm._replace(
    steps=warm.steps + together.steps * together.rows * warm.length
    // warm.batch
  )  # fmt: skip
  rows = ablation.trained(run, {'model': config}, seeds)
  found, kept, same, spent = {BOTH: [], ALONE: []}, [], True, []
  for seed, one in zip(seeds, rows['model'], strict=True):
    job, params = one.opened
    made = _generator(job, params)
    train, held = (
      draft.rows(made.tokenizer, config.data.path, part, text[0], warm.length)
      for part in (False, True)
    )
    ids = draft.beginnings(
      made.tokenizer, draft.documents(config.data.path, True), *text[1:3]
    )
    apart = max(warm.rows, int(len(train) * warm.held))
    train, shape = np.split(train, [-apart])
    began = time.process_time()
    alone, own, tuned = _fitted(
      made, params, train, [x._replace(seed=seed) for x in (warm, long)],
      together, run.say,
    )  # fmt: skip
    spent.append(time.process_time() - began)
    with build.use(made.built):
      losses = [_loss(made.built.model, p, held) for p in (params, tuned)]
    kept.append(losses[1] / losses[0])
    ask = lambda own, name, made=made, shape=shape, ids=ids, seed=seed: _asked(
      made, own, shape, warm, ids, text[3], method,
      workdir_lib.prepare(run.results) / f'{name}-{seed}.npz',
    )  # fmt: skip
    mean, one_by_one = ask(alone, 'alone')
    found[ALONE].append(mean)
    made.replace(tuned)
    mean, equal = ask(own, 'together')
    found[BOTH].append(mean)
    same &= one_by_one and equal
  seconds = ablation.cpu_seconds(rows) + max(spent)
  outcome = ablation.outcome(
    run,
    found,
    [
      ablation.more(found, BOTH, ALONE, 0.0, seconds),
      ablation.at_most('loss of text over what it was', kept, within, seconds),
    ],
    'tokens a call',
    f'greedy, {text[1]} held-out prompts of {text[2]} tokens, '
    f'{text[3]} new ones each; loss over what it was '
    f'{np.mean(kept):.4f}; {"the same" if same else "NOT the same"} texts as '
    'one by one',
    seconds,
  )
  lost = dict(passed=False, verdict='', sound=False)
  return outcome if same else outcome._replace(**lost)


def _generator(job, params):
  decode = job.config.decode
  return loop.Generator(
    job.built, params, job.tokenizer, decode, lambda line: None
  )


def _fitted(made, params, rows, recipes, together, say):
  """(heads alone, heads of both, the model's parameters with them).

  Args:
    params: {path: array} as `init` gives them. recipes: of the warm-up, alone.
  """
  model = made.built.model
  with build.use(made.built):
    seen = distill.features(model, made.params, rows, 0, recipes[0].rows)
    begun, alone = (
      distill.fit(model, made.params, seen, 'medusa', recipe, None, say)
      for recipe in recipes
    )
    seed = recipes[0].seed
    return alone, *joint.fit(model, params, begun, rows, together, seed, say)


def _loss(model, params, rows):
  """Nats a token of rows of text."""
  run = jax.jit(lambda params, x: joint.text_loss(model, params, x)[0])
  return float(run(params, jnp.asarray(rows)))


def _asked(made, own, rows, recipe, ids, new, method, path):
  """(tokens a call, whether the texts are those of one by one) of heads.

  Args:
    rows: of text, on which their accuracy shapes the tree; ids: of prompts.
  """
  model, config = made.built.model, made.built.model.config
  with build.use(made.built):
    seen = distill.features(model, made.params, rows, 0, recipe.rows)
    right = distill.accuracy(
      model, made.params, own, seen, 'medusa', choices=recipe.choices
    )
  shape = config.vocab_size, config.d_model, config.num_layers
  about = heads.About('medusa', 0, shape, made.tokenizer.fingerprint, right)
  heads.save(path, about, own)
  greedy = dict(max_new_tokens=new, temperature=0.0)
  wanted = made.generate(ids, **greedy)
  texts = made.generate(ids, **greedy, **method, draft=str(path))
  calls = sum(sum(r['lengths']) for r in texts)
  tokens = sum(k * n for r in texts for k, n in enumerate(r['lengths']))
  same = [r['tokens'] for r in texts] == [r['tokens'] for r in wanted]
  return tokens / calls, same
