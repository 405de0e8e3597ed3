"""Accelerators by name: peak figures of a chip, and sizes of slices.

    v5p:8x8x8        512 TPU v5p chips in one slice
    h200:256         256 H200 GPUs, eight to a host
    h200:1x32x8      the same: slices x hosts x GPUs of a host

Figures are the makers' published ones, for one chip; they are upper bounds, and
a time made from them is a model. Bandwidth of links is one way. Sources, read
in 2026: Google Cloud's pages on each TPU ("system architecture": peak compute,
HBM, bidirectional ICI bandwidth per chip over 4 or 6 ports, data center network
per chip); for v4's links arXiv:2304.01433, its network is taken as v5p's;
NVIDIA's data sheets of H100 and H200 SXM (dense bfloat16, NVLink 900 GB/s in
both directions together) and of their DGX (one 400 Gbit/s port per GPU).
"""

import dataclasses
import math
import re

from paraxis.configs import schema
from paraxis.configs.base import errors

GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of chip.

  hbm: bytes. flops: bfloat16 per second. hbm_bandwidth: bytes per second. link:
  bytes per second of one link, one way (of a GPU: to its host's switch).
  network: bytes per second beyond the slice, or beyond the host of a GPU, one
  way. dimensions: of its torus. most: chips in the largest slice.
  """

  platform: str
  hbm: int
  flops: float
  hbm_bandwidth: float
  link: float
  network: float
  dimensions: int
  most: int


_GIB = 2**30
CHIPS = {
  'v4': Chip('tpu', 32 * _GIB, 275e12, 1.2e12, 50e9, 6.25e9, 3, 4096),
  'v5e': Chip('tpu', 16 * _GIB, 197e12, 819e9, 50e9, 3.125e9, 2, 256),
  'v5p': Chip('tpu', 95 * _GIB, 459e12, 2765e9, 100e9, 6.25e9, 3, 8960),
  'v6e': Chip('tpu', 32 * _GIB, 918e12, 1638e9, 100e9, 12.5e9, 2, 256),
  'tpu7x': Chip('tpu', 192 * _GIB, 2307e12, 7380e9, 100e9, 12.5e9, 3, 9216),
  'h100': Chip('cuda', 80 * 10**9, 989e12, 3.35e12, 450e9, 50e9, 0, 16384),
  'h200': Chip('cuda', 141 * 10**9, 989e12, 4.8e12, 450e9, 50e9, 0, 16384),
}
# What jax calls a device -> its kind; the longest that it begins with counts.
KINDS = {
  'TPU v4': 'v4', 'TPU v5 lite': 'v5e', 'TPU v5e': 'v5e', 'TPU v5': 'v5p',
  'TPU v5p': 'v5p', 'TPU v6 lite': 'v6e', 'TPU v6e': 'v6e', 'TPU7x': 'tpu7x',
  'NVIDIA H100': 'h100', 'NVIDIA H200': 'h200',
  # Others of the name, with other figures: not known.
  'NVIDIA H100 PCIe': '', 'NVIDIA H100 NVL': '', 'NVIDIA H200 NVL': '',
}  # fmt: skip
EXAMPLES = (
  'v4:4x4x4',
  'v5e:16x16',
  'v5p:8x8x8',
  'v6e:16x16',
  'tpu7x:4x4x4',
  'h100:32',
  'h200:256',
)


def of_device(device) -> Chip | None:
  """The `Chip` that a jax device is, by its device_kind; None: not known."""
  kind = device.device_kind
  fits = [name for name in KINDS if kind.startswith(name)]
  return CHIPS.get(KINDS[max(fits, key=len)]) if fits else None


def cores(devices) -> int:
  """jax devices of a chip: 2 on TPU7x; 1 where they do not say where they are.

  On v4 a program at work sees one device a chip, so no table says it.
  """
  places = [
    (getattr(d, 'slice_index', 0), *place)
    for d in devices
    if (place := getattr(d, 'coords', None))
  ]
  return max(map(places.count, set(places)), default=1)


def parse(name: str, num_slices: int = 1) -> tuple[str, Chip, tuple[int, ...]]:
  """'v5p:8x8x8' -> (kind, Chip, sizes): sizes of the torus of one slice.

  Of a GPU: (slices, hosts, GPUs of a host).

  Raises:
    UserError: no such chip, or sizes that no slice of it has.
  """
  kind, _, shape = name.partition(':')
  chip = CHIPS.get(kind)
  if chip is None or not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', shape):
    raise errors.UserError(
      f'--topology={name}: not CHIP:SIZES; for example {", ".join(EXAMPLES)}.'
      + ('' if chip else schema.suggest(kind, CHIPS))
    )
  sizes = tuple(map(int, shape.split('x')))
  if num_slices < 1 or (num_slices > 1 and chip.platform != 'tpu'):
    raise errors.UserError(
      f'--slices={num_slices} with {name}: slices are of TPUs, at least '
      'one; of GPUs write SLICESxHOSTSx8.'
    )
  if chip.platform == 'cuda':
    sizes = _gpus(name, sizes)
  elif len(sizes) != chip.dimensions:
    raise errors.UserError(
      f'--topology={name}: {kind} chips form a torus of {chip.dimensions} '
      f'dimensions, {shape} has {len(sizes)}.'
    )
  count = math.prod(sizes)
  if count > chip.most:
    raise errors.UserError(
      f'--topology={name}: {count} chips in one slice, and the largest of '
      f'{kind} has {chip.most}'
      + ('; more of them: --slices.' if chip.platform == 'tpu' else '.')
    )
  return kind, chip, sizes


def _gpus(name, sizes):
  """(slices, hosts, GPUs of a host) from one number or all three."""
  if len(sizes) == 3 and sizes[2] <= GPUS_PER_HOST:
    return sizes
  (count,) = sizes if len(sizes) == 1 else (0,)
  if 0 < count <= GPUS_PER_HOST:
    return 1, 1, count
  if count and count % GPUS_PER_HOST == 0:
    return 1, count // GPUS_PER_HOST, GPUS_PER_HOST
  near = max(1, round(count / GPUS_PER_HOST)) * GPUS_PER_HOST
  raise errors.UserError(
    f'--topology={name}: write the number of GPUs, at most {GPUS_PER_HOST} or '
    f'a multiple of it (the nearest is {near}), or SLICESxHOSTSxGPUS with at '
    f'most {GPUS_PER_HOST} GPUs to a host.'
  )


# Properties of a GPU that ahead-of-time compilation needs and a driver would
# report (Hopper: 132 processors with 64 Ki registers and 228 KiB each).
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  name: "{name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
_HOPPERS = {
  'h100': ('NVIDIA H100 80GB HBM3', 84942979072, 3352320000000),
  'h200': ('NVIDIA H200 141GB HBM3e', 151397597184, 4800000000000),
}


def cuda_text(kind):
  """Description of a GPU for the compiler (GpuTargetConfigProto, as text)."""
  name, memory, bandwidth = _HOPPERS[kind]
  return _HOPPER.format(name=name, memory=memory, bandwidth=bandwidth)
