"""A small index on 127.0.0.1 and hand-made archives; no other network."""

import gzip
import hashlib
import http.server
import io
import json
import os
import pathlib
import re
import tarfile
import threading
import types
import urllib.request

import pytest

from paraxis.configs.base import errors
from paraxis.train.data import archive_texts
from paraxis.train.data import corpus
from paraxis.train.data import fetch
from paraxis.train.data import package_index

TEXT = {n: f'Document {n}. ' + 'Some words to read. ' * 20 for n in range(6)}


def sdist(files):
  """Bytes of a .tar.gz with {member name: text or bytes}, and a link."""
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode='w:gz') as tar:
    for name, text in files.items():
      body = text if isinstance(text, bytes) else text.encode()
      info = tarfile.TarInfo(name)
      info.size = len(body)
      tar.addfile(info, io.BytesIO(body))
    link = tarfile.TarInfo('pkg-1/docs/link.txt')
    link.type, link.linkname = tarfile.SYMTYPE, '/etc/hostname'
    tar.addfile(link)
  return buffer.getvalue()


def sha(body):
  return hashlib.sha256(body).hexdigest()


PKG = sdist(
  {
    'pkg-1/LICENSE': 'Permission is granted.',
    'pkg-1/setup.py': 'raise SystemExit("never run")',
    'pkg-1/docs/a.txt': TEXT[0] + '\r\nend\r\n',
    'pkg-1/docs/b.txt': TEXT[1],
    'pkg-1/docs/copy_of_b.txt': TEXT[1],
    'pkg-1/docs/short.txt': 'short',
    'pkg-1/docs/latin.txt': ('\xe9' * 300).encode('latin-1'),
    'pkg-1/docs/../../../escaped.txt': TEXT[2],
    '/pkg-1/docs/absolute.txt': TEXT[3],
    'pkg-1/docs/tests/t.txt': TEXT[4],
    'pkg-1/src/m.py': TEXT[5],
  }
)
SOURCE = {
  'package': 'Some_Pkg',
  'file': 'some_pkg-1.tar.gz',
  'sha256': sha(PKG),
  'licence': 'MIT',
  'licence_files': ['*/LICENSE'],
  'texts': [['docs', '*/docs/*.txt'], ['code', '*/src/*.py']],
}


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *args):
    pass

  def do_GET(self):
    state = self.server.state
    state.asked.append((self.path, self.headers.get('Range')))
    state.logins.append(self.headers.get('Authorization'))
    if self.path == '/simple/some-pkg/' and state.listed:
      return self.answer(200, *state.page())
    if self.path != '/files/some_pkg-1.tar.gz':
      return self.answer(404, 'text/plain', b'no')
    have = re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range') or '')
    if not have:
      return self.answer(200, 'application/gzip', state.body)
    if int(have[1]) >= len(state.body):
      return self.answer(416, 'text/plain', b'')
    return self.answer(206, 'application/gzip', state.body[int(have[1]) :])

  def answer(self, code, kind, body):
    self.send_response(code)
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    whole = code == 200 and self.path.startswith('/files')
    self.wfile.write(body[: self.server.state.cut if whole else None])


@pytest.fixture
def index(tmp_path, monkeypatch):
  """The server's state; pip and the cache are pointed at it."""
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  state = types.SimpleNamespace(
    body=PKG, sha=sha(PKG), listed=True, yanked=None
  )
  state.asked, state.logins, state.cut = [], [], None

  def page():
    mark = '' if state.yanked is None else f' data-yanked="{state.yanked}"'
    return 'text/html', (
      '<a href="../../files/some_pkg-0.tar.gz">old</a><a href="../../files/'
      f'some_pkg-1.tar.gz#sha256={state.sha}"{mark}>x</a>'
    ).encode()

  state.page = page
  state.port = server.server_port
  server.state = state
  threading.Thread(target=server.serve_forever, daemon=True).start()
  for name in [n for n in os.environ if n.upper().startswith('PIP_')]:
    monkeypatch.delenv(name)
  monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
  monkeypatch.setenv(
    'PIP_INDEX_URL', f'http://me:s%40cret@127.0.0.1:{state.port}/simple/'
  )
  monkeypatch.setenv('NO_PROXY', '127.0.0.1')
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path / 'cache'))
  recipe = tmp_path / 'sources.json'
  recipe.write_text(json.dumps({'packages': [SOURCE], 'debian': []}))
  monkeypatch.setattr(fetch, 'SOURCES', recipe)
  yield state
  server.shutdown()
  server.server_close()


@pytest.fixture
def quick(index):
  """The index as pip_index would give it, without asking pip."""
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  url = f'http://127.0.0.1:{index.port}/simple'
  return package_index.Index((url,), (), opener, {})


def documents(folder, domain):
  lines = (folder / f'{domain}.jsonl').read_text('utf-8').split('\n')[:-1]
  return {r['id']: r['text'] for r in map(json.loads, lines)}


def test_fetch_reads_only_what_it_should(index, tmp_path):
  said = []
  result = fetch.fetch(say=said.append)
  out = tmp_path / 'cache' / 'corpus'
  assert result['out'] == str(out)
  assert documents(out, 'docs') == {
    'pkg-1/docs/a.txt': TEXT[0] + '\nend\n',
    'pkg-1/docs/b.txt': TEXT[1],
  }
  assert documents(out, 'code') == {'pkg-1/src/m.py': TEXT[5]}
  assert result['dropped'] == {
    'duplicate': 1,
    'under 200 bytes': 1,
    'not UTF-8': 1,
    'unsafe path': 2,
    'test file': 1,
  }
  assert not list(tmp_path.rglob('*escaped*'))
  manifest = json.loads((out / 'manifest.json').read_text())
  row = manifest['domains']['docs']
  assert row['sha256'] == sha((out / 'docs.jsonl').read_bytes())
  assert row['bytes'] == len(TEXT[0] + '\nend\n' + TEXT[1])
  assert row['documents'] == 2 and row['licences'] == ['MIT']
  assert row['sources'] == {'Some_Pkg': 'some_pkg-1.tar.gz'}
  notice = (out / 'notices' / 'Some_Pkg.notice').read_text()
  assert 'Permission is granted.' in notice
  assert 'MIT [pkg-1/LICENSE]' in said[0]
  # Nothing but the texts is training text.
  assert {s.domain for s in corpus.source_files(out)} == {'code', 'docs'}
  assert not [p for p in out.iterdir() if p.name.startswith('.new')]
  assert set(index.logins) == {'Basic bWU6c0BjcmV0'}  # me:s@cret
  assert 'cret' not in ''.join(said)


def test_second_run_is_identical_and_drops_stale_domains(index, tmp_path):
  out = tmp_path / 'mine'
  fetch.fetch(out, say=lambda line: None)
  first = {p.name: p.read_bytes() for p in out.glob('*.json*')}
  asked = len(index.asked)
  (out / 'own.txt').write_text('not ours')
  fetch.fetch(out, say=lambda line: None)
  assert {p.name: p.read_bytes() for p in out.glob('*.json*')} == first
  assert len(index.asked) == asked  # everything was cached
  recipe = {'packages': [SOURCE | {'texts': SOURCE['texts'][:1]}]}
  fetch.SOURCES.write_text(json.dumps(recipe))
  fetch.fetch(out, say=lambda line: None)
  left = {p.name for p in out.iterdir()}
  assert left == {'docs.jsonl', 'manifest.json', 'notices', 'own.txt'}


def test_resume_from_half_a_part(index, quick, tmp_path):
  half = len(PKG) // 2
  (tmp_path / 'some_pkg-1.tar.gz.part').write_bytes(PKG[:half])
  assert package_index.download(SOURCE, tmp_path, quick) == 'resumed'
  assert (tmp_path / SOURCE['file']).read_bytes() == PKG
  assert index.asked[-1][1] == f'bytes={half}-'
  assert not (tmp_path / 'some_pkg-1.tar.gz.part').exists()


def test_a_broken_connection_is_resumed(index, quick, tmp_path):
  index.cut = 100  # the first answer, the whole file, stops after 100 bytes
  assert package_index.download(SOURCE, tmp_path, quick) == 'new'
  assert (tmp_path / SOURCE['file']).read_bytes() == PKG
  assert [span for _, span in index.asked] == [None, None, 'bytes=100-']


@pytest.mark.parametrize('part', [PKG, b'x' * 50, PKG + b'more'])
def test_whole_or_bad_part(index, quick, tmp_path, part):
  (tmp_path / 'some_pkg-1.tar.gz.part').write_bytes(part)
  package_index.download(SOURCE, tmp_path, quick)
  assert (tmp_path / SOURCE['file']).read_bytes() == PKG


def test_flipped_byte_is_fetched_again(index, quick, tmp_path):
  path = tmp_path / SOURCE['file']
  path.write_bytes(PKG)
  assert package_index.download(SOURCE, tmp_path, quick) == 'cached'
  assert index.asked == []
  path.write_bytes(PKG[:50] + bytes([PKG[50] ^ 1]) + PKG[51:])
  assert package_index.download(SOURCE, tmp_path, quick) == 'new'
  assert path.read_bytes() == PKG


def test_other_bytes_are_refused(index, quick, tmp_path):
  index.body = PKG + b'evil'
  with pytest.raises(errors.IntegrityError, match='Some_Pkg.*refused'):
    package_index.download(SOURCE, tmp_path, quick)
  assert list(tmp_path.glob('some_pkg*')) == []


def test_no_such_file_is_one_line(index, quick, tmp_path):
  def fault():
    with pytest.raises(errors.UserError) as caught:
      package_index.download(SOURCE, tmp_path, quick)
    assert '\n' not in str(caught.value) and 'Some_Pkg' in str(caught.value)
    return str(caught.value)

  index.yanked = 'broken wheel'
  assert 'yanked by its authors broken wheel' in fault()
  index.yanked, index.sha = None, '0' * 64
  assert f'sha256 {"0" * 64}' in fault()
  index.listed = False
  assert 'not on the 1 configured indexes' in fault()


def test_index_may_not_point_at_files_here(index, quick, tmp_path):
  page = b'<a href="file:///etc/some_pkg-1.tar.gz">x</a>'
  index.page = lambda: ('text/html', page)
  with pytest.raises(errors.UserError, match='not on the 1'):
    package_index.locate(SOURCE, quick)


def test_file_index_extra_index_and_find_links(index, tmp_path, monkeypatch):
  page = tmp_path / 'local' / 'some-pkg' / 'index.html'
  page.parent.mkdir(parents=True)
  (tmp_path / 'files').mkdir()
  (tmp_path / 'files' / SOURCE['file']).write_bytes(PKG)
  page.write_text('<a href="../../files/some_pkg-1.tar.gz">x</a>')
  index.listed = False
  local = (tmp_path / 'local').as_uri()
  monkeypatch.setenv('PIP_EXTRA_INDEX_URL', local)
  found = package_index.pip_index()
  assert found.urls[1] == local
  there = (tmp_path / 'files' / SOURCE['file']).as_uri()
  assert package_index.locate(SOURCE, found) == there
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path / 'files'))
  found = package_index.pip_index()
  assert found.urls == ()
  assert package_index.download(SOURCE, tmp_path, found) == 'new'


def test_pip_default_missing_pip_and_bad_certificate(index, monkeypatch):
  monkeypatch.delenv('PIP_INDEX_URL')
  (default,) = package_index.pip_index().urls
  assert default.startswith('https://') and default.endswith('/simple')
  with monkeypatch.context() as m:  # uv leaves pip out of its environments
    m.setattr(package_index.importlib.util, 'find_spec', lambda name: None)
    failed = types.SimpleNamespace(returncode=1, stderr='No module named pip')
    m.setattr(package_index, '_run', lambda *a, **k: failed)
    with pytest.raises(errors.UserError, match='uv pip install pip'):
      package_index.pip_index()
  monkeypatch.setenv('PIP_CERT', '/no/such/ca.pem')
  with pytest.raises(errors.UserError, match='/no/such/ca.pem'):
    package_index.pip_index()


def test_skip_and_bad_out(index, tmp_path):
  with pytest.raises(errors.UserError, match='--skip=nope'):
    fetch.fetch(skip=['nope'])
  assert fetch.fetch(skip=['Some_Pkg'], say=print)['domains'] == {}
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UserError, match='cannot write'):
    fetch.fetch(tmp_path / 'file')


def ar(members):
  body = b'!<arch>\n'
  for name, data in members:
    head = f'{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n'
    body += head.encode() + data + b'\n' * (len(data) % 2)
  return body


def test_debian_lane(index, tmp_path, monkeypatch):
  page = '.\\" comment\n.de macro\n.TH x 1\n' + TEXT[0]
  data = sdist(
    {
      './usr/share/doc/man/copyright': 'GPL',
      './usr/share/man/man1/x.1.gz': gzip.compress(page.encode()),
    }
  )
  deb = ar([('debian-binary', b'2.0'), ('data.tar.gz', data)])
  source = {
    'package': 'man',
    'licence': 'GPL-2',
    'licence_files': ['usr/share/doc/*/copyright'],
    'texts': [['debian_man', 'usr/share/man/man*/*.gz', 'man']],
  }
  recipe = {'packages': [], 'debian': [source, source | {'package': 'gone'}]}
  fetch.SOURCES.write_text(json.dumps(recipe))
  calls = []

  def apt(*command, folder=None):
    calls.append(command)
    if command[0] == 'apt-cache':
      show = f'Version: 1:2\nSHA256: {sha(deb)}\nFilename: pool/man_2_all.deb\n'
      return (True, show) if command[-1] == 'man' else (False, 'E: none')
    pathlib.Path(folder, 'man_1%3a2_all.deb').write_bytes(deb)
    return True, ''

  monkeypatch.setattr(package_index, '_apt', apt)
  monkeypatch.setattr(package_index.shutil, 'which', lambda name: name)
  said = []
  fetch.fetch(tmp_path / 'out', debian=True, say=said.append)
  texts = documents(tmp_path / 'out', 'debian_man')
  assert texts == {'usr/share/man/man1/x.1.gz': '.TH x 1\n' + TEXT[0]}
  assert fetch.COPYLEFT in said[1] and 'man_2_all.deb' in said[1]
  assert said[0] == 'gone: not in this Debian release, left out'
  downloads = [c for c in calls if c[0] == 'apt-get']
  assert downloads == [('apt-get', 'download', '-q', 'man=1:2')]
  fetch.fetch(tmp_path / 'out', debian=True, say=said.append)
  assert len([c for c in calls if c[0] == 'apt-get']) == 1  # cached
  recipe['debian'] = recipe['debian'][1:]
  fetch.SOURCES.write_text(json.dumps(recipe))
  with pytest.raises(errors.UserError, match='apt-get update'):
    fetch.fetch(tmp_path / 'out', debian=True)
  monkeypatch.setattr(package_index.shutil, 'which', lambda name: None)
  with pytest.raises(errors.UserError, match='--debian needs apt-get'):
    fetch.fetch(tmp_path / 'out', debian=True)


def test_damaged_and_zstd_deb(tmp_path):
  path = tmp_path / 'x.deb'
  for body in (b'not ar', ar([('debian-binary', b'2.0')])):
    path.write_bytes(body)
    with pytest.raises(errors.IntegrityError, match='x.deb'):
      archive_texts.deb_data(path)
  if 'zst' not in tarfile.TarFile.OPEN_METH:
    path.write_bytes(ar([('data.tar.zst', b'')]))
    with pytest.raises(errors.UserError, match='zstd'):
      archive_texts.deb_data(path)


def test_readers():
  book = (
    'raise SystemExit(1)\nbible = Bible(V.K, """\nIn [the] beginning\nAnd '
    'then""", {1001001: 1, 1002001: 20, 1002002: 22}, {B.G: "x"}, False)\n'
  )
  chapters = list(archive_texts.READERS['bible'](book))
  assert chapters == [
    ('#01.001', 'In the beginning\n'),
    ('#01.002', 'And then\n'),
  ]

  def said(who, text):
    return {'text': text, 'sender': who, 'timestamp': '2018'}

  turns = [[said('u', 'Hi\n you'), said('u', ' ')], [said('w', 'Yo')]]
  talk = json.dumps({'id': {'messages': turns, 'ratings': {'witty': 1}}})
  (dialogue,) = archive_texts.READERS['dialogue'](talk)
  assert dialogue == ('#00000', 'A: Hi you\nB: Yo\n')
  page = '<head>no</head><p>a &lt; b</p><p>c</p><script>x<y</script>'
  assert list(archive_texts.READERS['html'](page)) == [('', 'a < b\nc\n')]
  entries = [f'word{n}\n   ' + 'meaning ' * 200 for n in range(9)]
  parts = list(archive_texts.READERS['dictionary']('\n'.join(entries)))
  assert ''.join(text for _, text in parts) == '\n'.join(entries) + '\n'
  assert len(parts) == 3 and max(len(text) for _, text in parts) <= 8001


def test_shipped_recipe():
  recipe = json.loads(fetch.SOURCES.read_text())
  assert len(recipe['packages']) == 15 and len(recipe['debian']) == 8
  names = {t[0] for s in recipe['packages'] for t in s['texts']}
  assert len(names) >= 13
  assert '://' not in fetch.SOURCES.read_text()
  for source in recipe['packages']:
    assert re.fullmatch('[0-9a-f]{64}', source['sha256'])
  for source in recipe['packages'] + recipe['debian']:
    debian = source in recipe['debian']
    for rule in source['texts']:
      assert rule[0].startswith('debian_') == debian
      assert len(rule) == 2 or rule[2] in archive_texts.READERS


def test_listing(index, tmp_path):
  fixture = fetch.listing()
  assert {r['corpus'] for r in fixture} == {'fixture'}
  assert len(fixture) == 6
  assert 'not fetched yet' in fetch.table(fixture)
  fetch.fetch(say=lambda line: None)
  rows = [r for r in fetch.listing() if r['corpus'] == 'corpus']
  assert [(r['domain'], r['documents']) for r in rows] == [
    ('code', 1),
    ('docs', 2),
  ]
  assert 'MIT' in fetch.table(rows)
  (tmp_path / 'cache' / 'corpus' / 'manifest.json').write_text('[]')
  with pytest.raises(errors.IntegrityError, match='damaged'):
    fetch.listing()
