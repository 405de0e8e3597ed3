"""Mutations of update rules."""

from mutants.mutation import Mutation

TABLE = [
  Mutation(
    'muon_experts',
    'train/updates/optimizers.py',
    "batch = sum(name in ('layers', 'experts') for name in axes[:2])",
    "batch = sum(name == 'layers' for name in axes[:2])",
    'Muon takes the experts of a layer for one matrix',
    'tests/train/updates/test_optimizers.py::test_muon_equals_a_numpy_loop',
  ),
  Mutation(
    'learning_rate',
    'train/updates/optimizers.py',
    'fall(step + 1 - start)',
    'fall(step - start)',
    'the learning rate falls a step too late',
    'tests/train/updates/test_optimizers.py::test_schedules',
  ),
  Mutation(
    'muon_aspect',
    'train/updates/update_rules.py',
    'lambda m, n: max(1.0, n / m) ** 0.5',
    'lambda m, n: max(1.0, m / n) ** 0.5',
    'Muon scales matrices by the other ratio',
    'tests/train/updates/test_optimizers.py::test_muon_equals_a_numpy_loop',
  ),
  Mutation(
    'weight_decay',
    'train/updates/optimizers.py',
    "decayed = {p: kinds[p] != 'vector' for p in paths}",
    'decayed = {p: True for p in paths}',
    'norms and biases decay',
    'tests/train/updates/test_optimizers.py::test_adamw_equals_a_numpy_loop',
  ),
  Mutation(
    'soap_side',
    'train/updates/soap.py',
    'x if left is None else left.mT @ x',
    'x if left is None else left @ x',
    'SOAP turns gradients by the transposed basis',
    'tests/train/updates/test_update_rules.py::test_a_rule_equals_a_numpy_loop',
  ),
  Mutation(
    'soap_power',
    'train/updates/soap.py',
    'jnp.linalg.qr(x)[0], s @ basis)',
    'jnp.linalg.qr(x)[0], basis + 0 * s)',
    'bases of SOAP are never refreshed',
    'tests/train/updates/test_update_rules.py::test_a_rule_equals_a_numpy_loop',
  ),
  Mutation(
    'kron_probe',
    'train/updates/kron.py',
    'c = matrices.apiece(solve, left, probe)',
    'c = matrices.apiece(solve, left.mT, probe)',
    'factors of Kron are fitted to another inverse',
    'tests/train/updates/test_update_rules.py::'
    'test_kron_whitens_what_it_is_given',
  ),
  Mutation(
    'mars_change',
    'train/updates/update_rules.py',
    '* (g - old)',
    '* (old - g)',
    'MARS corrects gradients the other way',
    'tests/train/updates/test_update_rules.py::test_a_rule_equals_a_numpy_loop',
  ),
  Mutation(
    'matrices_order',
    'train/updates/matrices.py',
    'first += count',
    'first += 0',
    "parameters of one shape all take the first one's update",
    'tests/train/updates/test_update_rules.py::test_a_rule_equals_a_numpy_loop',
  ),
  Mutation(
    'matrices_fill',
    'train/updates/matrices.py',
    'out[path] = x[first : first + count].reshape(shape)',
    'out[path] = x[len(x) - count :].reshape(shape)',
    'matrices that fill a stack are taken for others',
    'tests/train/updates/test_update_rules.py::test_a_mesh_changes_nothing',
  ),
]
