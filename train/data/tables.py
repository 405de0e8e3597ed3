"""Tables -> blocks of rows: .parquet, and folders that `datasets` wrote.

Read in batches of 512 rows by pyarrow, which the extra `parquet` brings; only
the columns text, id, split and domain are.
"""

import json
import pathlib

from paraxis.configs.base import errors
from paraxis.train.data import rows

STATE = 'state.json'  # of a folder that `datasets` wrote
_TABLE_ROWS = 512  # rows of a table read at once


def is_dataset(folder) -> bool:
  """Whether `datasets` wrote this folder: a state.json that names its files."""
  return (folder / STATE).is_file() and (folder / 'dataset_info.json').is_file()


def parquet_blocks(source, options, say):
  parquet = rows.needed('pyarrow.parquet', 'parquet', source.file)
  arrow = rows.needed('pyarrow', 'parquet', source.file)
  try:
    with parquet.ParquetFile(source.file, buffer_size=1 << 20) as table:
      columns = _columns(table.schema_arrow, options.text_key, source.file)
      batches = table.iter_batches(_TABLE_ROWS, columns=columns)
      batches = _with_bytes(batches, table.metadata.num_rows, source.file)
      yield from _table_blocks(source, batches, options.text_key, say)
  except arrow.ArrowException as error:
    raise _not_read(source.file, error) from error


def _with_bytes(batches, total, file):
  """(batch, bytes of the file read so far, about)."""
  size, number = file.stat().st_size, 0
  for batch in batches:
    number += batch.num_rows
    yield batch, size * number // max(1, total)


def dataset_blocks(source, options, say):
  arrow = rows.needed('pyarrow', 'parquet', source.file)
  try:
    batches = _arrow_batches(arrow, source.file, options.text_key)
    yield from _table_blocks(source, batches, options.text_key, say)
  except arrow.ArrowException as error:
    raise _not_read(source.file, error) from error


def _not_read(file, error):
  return errors.UserError(
    f'{file}: cannot be read: {str(error).splitlines()[0]}'
  )


def dataset_files(folder) -> list[pathlib.Path]:
  """The Arrow files of a folder that `datasets` wrote, in order."""
  try:
    state = json.loads((folder / STATE).read_text(encoding='utf-8'))
    names = [pathlib.Path(f['filename']).name for f in state['_data_files']]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise errors.UserError(
      f'{folder / STATE}: does not list the files of a dataset: {error!r}.'
    ) from error
  if state.get('_indices_files') or state.get('_indices_data_files'):
    raise errors.UserError(
      f'{folder}: a selection of rows (indices), which is not read: write it '
      'again with flatten_indices().save_to_disk().'
    )
  return [folder / name for name in names]


def files_of(path) -> list[pathlib.Path]:
  """All files that decide the rows of a file or datasets folder."""
  if not path.is_dir():
    return [path]
  return [path / STATE, *dataset_files(path)]


def _arrow_batches(arrow, folder, text_key):
  before = 0
  for file in dataset_files(folder):
    with arrow.memory_map(str(file)) as mapped:
      with arrow.ipc.open_stream(mapped) as stream:
        columns = _columns(stream.schema, text_key, file)
        for batch in stream:
          for at in range(0, batch.num_rows, _TABLE_ROWS):
            part = batch.slice(at, _TABLE_ROWS).select(columns)
            yield part, before + mapped.tell()
    before += file.stat().st_size


def _columns(schema, text_key, file):
  """Names of the columns that are read. UserError: no text among them."""
  if text_key not in schema.names:
    raise errors.UserError(
      f'{file}: no column {text_key!r}; it has '
      f'{", ".join(map(repr, schema.names[:12]))}: name one by data.text_key.'
    )
  found = schema.field(text_key).type
  if str(found) not in ('string', 'large_string', 'string_view'):
    raise errors.UserError(
      f'{file}: column {text_key!r} is {found}, not text (string).'
    )
  return [n for n in ('id', 'split', 'domain') if n in schema.names] + [
    text_key
  ]


def _table_blocks(source, batches, text_key, say):
  found, size, first, number, empty = [], 0, 1, 0, 0
  done = 0
  for batch, done in batches:
    try:
      table = batch.to_pylist()
    except UnicodeDecodeError as error:
      raise errors.UserError(
        f'{source.file}: not UTF-8 in rows {number + 1} to '
        f'{number + batch.num_rows}: {error}.'
      ) from error
    for row in table:
      number += 1
      if not row[text_key]:
        empty += 1
        continue
      where = f'{source.file}, row {number}'
      found.append(rows.checked(row, where, number, text_key))
      size += len(row[text_key])
      if size >= rows.BLOCK:
        yield rows.Block(source, first, 'rows', b'', found, done)
        found, size, first = [], 0, number + 1
  if found:
    yield rows.Block(source, first, 'rows', b'', found, done)
  if empty:
    say(f'{source.file}: {empty} of {number} rows have no text: left out.')
