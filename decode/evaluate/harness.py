"""lm-eval on our models: its model 'paraxis' (extra `lm-eval`).

    python -m paraxis.decode.evaluate.harness run --model paraxis \\
      --model_args checkpoint=RUN --tasks hellaswag

or in Python: register(), then lm_eval.simple_evaluate(model='paraxis', ...).

The three kinds of requests, as lm_eval.api.model.LM describes them: blanks at
the end of a context belong to its continuation, rolling windows are disjoint,
prompts beyond the length of a row lose their first tokens, which is reported.
Every context begins with the bos token, as documents do in training; lm-eval's
own model 'hf' adds one only where the tokenizer's file asks for it:
add_bos_token=False is that. Characters that spell a special token are text.

Source: lm-eval 0.4.13 (github.com/EleutherAI/lm-evaluation-harness).
"""

import importlib
import sys
from typing import Any

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.decode import __main__ as decode_main
from paraxis.decode.evaluate import command

NEW = 256  # tokens that lm-eval's models make where a task names no number
_LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens')
# Of generate_until, what greedy decoding does whatever their value.
_IGNORED = ('do_sample', 'temperature', 'top_p', 'top_k', 'min_p')


class Requests:
  """Answers lm-eval's requests, objects whose `args` are what is asked.

  Attributes:
    scorer: score.Scorer. tokenizer_name: its tokenizer's.
  """

  def __init__(
    self,
    checkpoint='',
    weights='',
    step=None,
    mesh='',
    max_length=0,
    add_bos_token=True,
    **options,
  ):
    """Arguments of lm-eval's --model_args: those of `paraxis evaluate`.

    Args:
      max_length: --length.
      **options: batch_size, dtype (of activations), config (of a run with
        mixers of its own: their file), and what lm-eval passes to every model:
        device and max_batch_size, which are not read.
    """
    super().__init__()
    options.pop('device', None)
    options.pop('max_batch_size', None)
    dtype, file = options.pop('dtype', None), options.pop('config', None)
    size = options.pop('batch_size', None) or 8
    if options or not str(size).isdecimal():
      raise errors.UserError(
        f'lm-eval: model_args {", ".join(options) or f"batch_size={size}"}: '
        "not known to the model 'paraxis'; batch_size is a number."
      )
    overrides = {'model.dtype': dtype} if dtype else {}
    if file:
      command_line.load(file)
    with decode_main.open_(checkpoint, weights, step) as opened:
      self.scorer = command.scorer(
        opened, overrides, mesh, int(max_length), int(size)
      )
    self._opening = self.scorer.tokenizer.opening()
    self._first = self._opening if add_bos_token else []

  @property
  def tokenizer_name(self):
    return self.scorer.tokenizer.name

  def loglikelihood(self, requests, disable_tqdm=False):
    """[(log p of the continuation, whether it is the greedy one)]."""
    del disable_tqdm
    texts = [request.args for request in requests]
    found = self.scorer.continuations(texts, self._first)
    self._say_cut(sum(s.cut > 0 for s in found), len(found))
    return [(s.nats, s.greedy) for s in found]

  def loglikelihood_rolling(self, requests, disable_tqdm=False):
    """[log p of the whole text]."""
    del disable_tqdm
    texts = [request.args[0] for request in requests]
    return [nats for nats, _ in self.scorer.rolling(texts, self._opening)]

  def generate_until(self, requests, disable_tqdm=False):
    """[greedy text up to the first of the texts that end it]."""
    del disable_tqdm
    out, kinds = [''] * len(requests), {}
    for i, (context, options) in enumerate(r.args for r in requests):
      kinds.setdefault(_generation(options), []).append((i, context))
    for (new, stop), members in kinds.items():
      tokenizer = self.scorer.tokenizer
      ids = [[*self._first, *tokenizer.encode(text)] for _, text in members]
      ids = [row or self._opening for row in ids]
      texts, cut = self.scorer.texts(ids, new, stop)
      self._say_cut(cut, len(ids))
      for (i, _), text in zip(members, texts, strict=True):
        out[i] = text
    return out

  def _say_cut(self, cut, count):
    if cut:
      print(
        f'paraxis: {cut} of {count} requests are longer than '
        f'{self.scorer.length} tokens leave room for: cut from the left',
        file=sys.stderr,
      )


def _generation(options):
  """(most new tokens, texts that end) of a request's keywords."""
  options = dict(options)
  until = options.pop('until', None) or ()
  until = (until,) if isinstance(until, str) else until
  lengths = [options.pop(name, None) for name in _LENGTHS]
  new = next(filter(None, lengths), NEW)
  # As lm-eval has it, a temperature alone asks for samples.
  warm = options.get('do_sample') is None and options.get('temperature')
  beams = options.get('num_beams') not in (None, 1)
  rest = set(options) - {*_IGNORED, 'num_beams'}
  if options.get('do_sample') or warm or beams or rest:
    raise errors.UserError(
      f'lm-eval: generate_until with {options}: only greedy decoding '
      f'(do_sample=False, num_beams=1) with until and {_LENGTHS[0]}.'
    )
  return int(new), tuple(filter(None, until))


def register() -> Any:
  """The class that lm-eval knows as 'paraxis' from now on."""
  try:
    model = importlib.import_module('lm_eval.api.model')
    registry = importlib.import_module('lm_eval.api.registry')
  except ImportError as e:
    raise errors.UserError(
      f"lm-eval is not installed ({e}): pip install 'paraxis[lm-eval]'."
    ) from None
  if 'paraxis' in registry.model_registry:
    return registry.get_model('paraxis')
  made = type('ParaxisLM', (Requests, model.LM), {})
  return registry.register_model('paraxis')(made)


def main(argv=None):
  """lm-eval's own command line, with our model."""
  register()
  command_line.prepare_devices(0)
  if argv is not None:
    sys.argv[1:] = argv
  importlib.import_module('lm_eval.__main__').cli_evaluate()


if __name__ == '__main__':
  sys.exit(command_line.run(main, None))
