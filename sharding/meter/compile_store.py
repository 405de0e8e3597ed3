"""Compiled programs kept between runs, so that no kill can damage the store.

jax writes an entry of its compilation cache in place: a process that is killed
while it writes leaves half an entry, which jax never replaces and which it
warns of, and compiles again, at every later start. So no process writes to the
store. Each gets an overlay: a folder of its own with hard links to the entries
of the store, which jax reads and writes. Entries that are new and whole are
linked into the store under a name that ends in their length and a checksum;
link(2) is atomic. A stored entry that does not fit its name is dropped, which
is said, and made again by whoever needs it next: jax compresses entries by
zstandard without a checksum, so a flipped bit may be read as other code.

The programs are native code: whoever may write to the store decides what its
readers run. Its folders are the user's alone (mode 700); `distrust` says why
one is not to be used. CRC-32 is against accidents, not against them.

The store is a folder per kind of processor: code for one may be illegal on
another, and jax's key does not hold what the processor can do. The key does
hold the folder's own path unless jax_persistent_cache_enable_xla_caches is
'none' (xla_gpu_per_fusion_autotune_cache_dir, on CPU too): without that setting
no overlay would find anything, nor would a store that was moved.

Programs of several CPU devices that have collectives, and a loop or a branch,
are not kept: read back, they may hang (`may_hang`).
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import platform
import re
import secrets
import shutil
import stat
import tempfile
import zlib

from paraxis.configs.base import plain_files

SUFFIX = '-cache'  # of an entry's file (jax/_src/lru_cache.py)
OVERLAYS = 'overlays'
# What jax records before it looks for an entry.
_READS = '/jax/compilation_cache/compile_requests_use_cache'
# Opcodes in a serialized HLO module: a string, field 2 of an instruction.
_COLLECTIVE = re.compile(
  rb'\x12[\x00-\x7f](all-|reduce-scatter|collective-|ragged-all)'
)
_MARK = re.compile(r'\d+-[0-9a-f]{8}')
_NESTED = re.compile(rb'\x12(\x05while|\x0bconditional|\x04call)')


def processor():
  """'x86_64-<digest>' of what this machine's processor says that it can do."""
  text = platform.processor() + platform.version()
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    lines = cpuinfo.read_text(encoding='utf-8').splitlines()
    text = next((x for x in lines if x.startswith(('flags', 'Features'))), text)
  # 2: without programs that may hang. 3: operations name their scopes, which
  # jax's key does not hold. 4: names hold a checksum.
  digest = hashlib.sha256(f'4 {text}'.encode()).hexdigest()[:12]
  return f'{platform.machine()}-{digest}'


def distrust(root) -> str:
  """Why nothing in a folder of stores may be run, in a few words; '': it may.

  Looks at the folder and at this processor's store in it, where they exist.
  """
  root = pathlib.Path(root)
  for folder in (root, root / processor(), root / processor() / OVERLAYS):
    try:
      found = folder.stat()
    except FileNotFoundError:
      break
    if found.st_uid != os.geteuid():
      return f'{folder} belongs to another user (id {found.st_uid})'
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
      return f'{folder} may be written by other users (mode {mode:o})'
  return ''


def _mark(data):
  """How the name of a stored entry ends: 'LENGTH-CRC'."""
  return f'{len(data)}-{zlib.crc32(data):08x}'


class Overlay:
  """A folder for jax: the store's entries, and what is compiled meanwhile.

  Attributes:
    store: pathlib.Path of this processor's entries, NAME-cache.LENGTH-CRC each.
    folder: pathlib.Path, jax's compilation cache directory.
    began: digest of the store's entries that it began with.
  """

  def __init__(self, root, say=lambda line: None):
    """root: folder of the stores; one per processor is made in it.

    say: prints one line, on entries that are damaged.
    """
    self.store = pathlib.Path(root) / processor()
    around = self.store / OVERLAYS
    self.store.parent.parent.mkdir(parents=True, exist_ok=True)
    for folder in (self.store.parent, self.store, around):
      folder.mkdir(mode=0o700, exist_ok=True)
    _sweep(around)
    self.folder, self._lock = _made(around)
    self._known = set()
    damaged, found = 0, []
    for entry in os.scandir(self.store):
      name, _, mark = entry.name.rpartition('.')
      if not name.endswith(SUFFIX) or not _MARK.fullmatch(mark):
        continue
      fits = _fits(entry.path, mark)
      if fits is False:
        pathlib.Path(entry.path).unlink(missing_ok=True)
        damaged += 1
      elif fits:
        self._known.add(name)
        found.append(entry.name)
        _link(entry.path, self.folder / name)
    self.began = hashlib.sha256('\n'.join(sorted(found)).encode()).hexdigest()
    if damaged:
      say(
        f'paraxis: {damaged} compiled programs in {self.store} are damaged: '
        'they are compiled again'
      )

  def settings(self, seconds):
    """jax's settings {name: value}; as environment variables in upper case.

    seconds: programs that compile in less are not kept.
    """
    return dict(
      jax_compilation_cache_dir=str(self.folder),
      jax_persistent_cache_min_compile_time_secs=seconds,
      jax_persistent_cache_enable_xla_caches='none',
      jax_raise_persistent_cache_errors=False,
    )

  def publish(self):
    """Links entries that are new and whole into the store."""
    if not self.folder.exists():
      return
    for entry in os.scandir(self.folder):
      if entry.name.endswith(SUFFIX) and entry.name not in self._known:
        data = content(entry.path)
        if data is not None and not may_hang(data):
          mark = _mark(pathlib.Path(entry.path).read_bytes())
          _link(entry.path, self.store / f'{entry.name}.{mark}')
          self._known.add(entry.name)

  def close(self):
    """Publishes, and removes the overlay."""
    if self._lock is None:
      return
    self.publish()
    shutil.rmtree(self.folder, ignore_errors=True)
    os.close(self._lock)
    self._lock = None


def _fits(path, mark):
  """Whether a stored entry is what its name says; None: it does not read now.

  Another process removed it, this one has too many open files, and the like.
  """
  try:
    return _mark(plain_files.read_bytes(path)) == mark
  except OSError as e:
    return False if e.errno == errno.EINVAL else None  # EINVAL: no file


def content(path):
  """Bytes of an entry; None if jax cannot read it to its end."""
  from jax._src import compilation_cache  # no public function decompresses

  try:
    data = pathlib.Path(path).read_bytes()
    return compilation_cache.decompress_executable(data)
  except Exception:  # zlib's or zstd's, by what is installed
    return None


def may_hang(data):
  """Whether devices of an entry, on a CPU, may wait for each other for ever.

  XLA runs the operations of a program in any order that their buffers allow,
  and keeps collectives in one order on all devices by a resource that they
  share. In a program that is read back every loop, branch and call has a
  resource of its own (xla/backends/cpu/runtime/thunk_proto_serdes.cc; jaxlib
  0.10 and 0.12): of two with collectives, whose buffers do not meet, one device
  may enter the first and another the second. Seen in one run of five of a
  pipeline (v_half on 4 stages: the loss and the gradients of weights); XLA
  shows the order with TF_CPP_VMODULE=thunk_executor=6.
  """
  import jax  # loaded by whoever compiles

  cpu = jax.default_backend() == 'cpu'
  return bool(cpu and _COLLECTIVE.search(data) and _NESTED.search(data))


def guard(folder):
  """Removes entries that may hang from an overlay before this process, or one
  that shares it, reads them."""
  import jax

  known, seen = set(), 0

  def before(event, **_):
    nonlocal seen
    if event != _READS or not folder.exists():
      return
    if jax.default_backend() != 'cpu' or jax.device_count() == 1:
      return  # none may
    earlier, seen = seen, folder.stat().st_mtime_ns
    if earlier == seen:
      return
    for entry in os.scandir(folder):
      if entry.name.endswith(SUFFIX) and entry.name not in known:
        # What has a second link is in the store, or comes from there.
        with contextlib.suppress(FileNotFoundError):  # others remove some, too
          data = content(entry.path) if entry.stat().st_nlink == 1 else b''
          if data is None:  # it is being written; its end changes no folder
            seen = 0
            continue
          if may_hang(data):  # not known: its name comes again
            os.unlink(entry.path)
          else:
            known.add(entry.name)

  jax.monitoring.register_event_listener(before)


def _link(source, target):
  try:
    os.link(source, target)
  except (FileExistsError, FileNotFoundError):
    pass  # another process linked the same program, or dropped a torn one
  except OSError:  # no hard links in this file system
    new = f'{target}.{secrets.token_hex(8)}'
    shutil.copyfile(source, new)
    os.replace(new, target)


def _made(around):
  """(a new folder, its lock).

  Until the lock is held, another process's `_sweep` may take the folder for one
  whose process has ended, and remove it: then there is another.
  """
  for _ in range(10):
    folder = pathlib.Path(tempfile.mkdtemp(dir=around))
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
      handle = _locked(folder)
      if os.fstat(handle).st_nlink:  # 0: removed before it was locked
        return folder, handle
      os.close(handle)
  raise OSError(errno.EAGAIN, 'other processes remove each new folder', around)


def _locked(folder):
  handle = os.open(folder / 'lock', os.O_CREAT | os.O_RDWR)
  try:
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(handle)
    raise
  return handle


def _sweep(around):
  """Removes overlays whose process has ended: nobody holds their lock."""
  for entry in os.scandir(around):
    try:
      handle = _locked(pathlib.Path(entry.path))
    except OSError:
      continue
    shutil.rmtree(entry.path, ignore_errors=True)
    os.close(handle)
