"""`paraxis data fetch | list | show`: flags, and what is printed."""

from paraxis.configs.base import command_line
from paraxis.configs.base import errors


def _fetch(values, *_):
  from paraxis.train.data import fetch

  fetch.fetch(values.out or None, values.debian, skip=values.skip)


def _list(*_):
  from paraxis.train.data import fetch

  print(fetch.table(fetch.listing()))


def _show(values, config, _):
  if not values.rows:
    raise errors.UserError('--rows=0 shows nothing: give at least 1.')
  command_line.prepare_devices(1)
  import rich.console
  import rich.text

  from paraxis.models.text import tokenizer as tokenizer_lib
  from paraxis.train.data import batches as batches_lib
  from paraxis.train.data import corpus as corpus_lib
  from paraxis.train.data import show
  from paraxis.train.data import token_cache

  config = corpus_lib.with_places(config)
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  corpus = token_cache.tokens(config, tokenizer, print)
  batches = batches_lib.Batches(config, corpus)
  batch = batches.text_at(values.step)
  names = batches.documents_at(values.step)
  console = rich.console.Console(highlight=False, soft_wrap=True)
  print(f'step {values.step} of {corpus.path}: {batches.summary()}')
  for row in range(min(values.rows, len(names))):
    found = show.segments(batch, row, names[row], tokenizer)
    for part, style in show.row_lines(row, found, batch.tokens.shape[1]):
      if console.is_terminal:
        console.print(rich.text.Text(part, style), end='')
      else:
        print(part, end='')


COMMANDS = (
  command_line.Command(
    _fetch,
    'data fetch',
    '[--out=FOLDER]',
    'download more text to train on',
    (
      ('path', 'out=FOLDER', '', 'empty: the folder corpus in the user cache'),
      (bool, 'debian', False, 'also download the copyleft Debian texts'),
      (list, 'skip=NAME,...', [], 'packages to leave out'),
    ),
  ),
  command_line.Command(
    _list, 'data list', '', 'list the text available for training'
  ),
  command_line.Command(
    _show,
    'data show',
    '--config=configs/quickstart.py [--rows=2]',
    'rows of a batch as text: borders of segments, what carries loss',
    (
      ('count', 'rows=N', 2, 'rows that are shown'),
      ('count', 'step=N', 0, 'of the batch of this step'),
    ),
    'required',
  ),
)
