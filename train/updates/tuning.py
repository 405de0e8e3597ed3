"""Rates that pretrained weights are tuned at; a line where one is far above.

Configs for models from scratch have rates of 3e-3 and more: at those the first
hundred steps undo what weights of others have learned, and the loss, which
falls after it, does not say so.
"""

USUAL = '1e-5 to 3e-4'  # of adamw
MOST = 1e-3  # beyond it is far above
# Of rules of matrices, whose other parameters have the plain rate. Steps of the
# first two have singular values of 1, and elements far below it.
MATRICES = {'muon': 5e-3, 'scion': 5e-3, 'soap': MOST, 'kron': MOST}
CONFIG = 'configs/finetune.py'


def line(config, about) -> str:
  """What is said of the rates of a new run; '': nothing.

  Args:
    config: schema.Config of the run. about: of what it begins with, as of
      origin.Run and origin.Foreign.
  """
  rule, most = config.optimizer, {'learning_rate': MOST}
  if rule.name in MATRICES:
    most['matrix_learning_rate'] = MATRICES[rule.name]
  rates = {name: getattr(rule, name) for name in most}
  high = [f'{name}={x}' for name, x in rates.items() if x > most[name]]
  # A side network is new, and prodigy's rate is a factor.
  new = config.train.side or rule.name == 'prodigy'
  if not high or new or not about['kind']:
    return ''
  return (
    f'--init_from: optimizer.{" and ".join(high)}: pretrained weights are '
    f'usually tuned by adamw at {USUAL}, far above it they lose what they '
    f'know: take --config={CONFIG}, or --config.optimizer.learning_rate=2e-5 '
    '(of adapters 2e-4)'
  )
