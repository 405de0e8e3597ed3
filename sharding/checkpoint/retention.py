"""Which committed steps may be deleted: never the last that can be trusted.

A step counts for `keep` if its state was saved in good order. One that was
saved within a streak of skipped steps is suspect: its numbers are finite, and
the run may have left its path long before. Damaged steps count for nothing.
"""

from collections.abc import Iterable


def expendable(
  steps: Iterable[int],
  keep: int,
  suspect: Iterable[int] = (),
  verified: Iterable[int] = (),
) -> list[int]:
  """Steps to delete, oldest first.

  Args:
    steps: committed ones that are not known to be damaged.
    keep: how many of those that are not suspect stay, the newest.
    suspect: steps saved within a streak of skipped steps.
    verified: steps whose arrays were read back and fit their fingerprints.

  The newest step stays; so does the newest verified one that is not suspect.
  Until `keep` steps in good order follow a suspect one, the newest before it
  stays, and of suspect steps the oldest, which marks the place.
  """
  steps, suspect, verified = sorted(steps), set(suspect), set(verified)
  clean = [s for s in steps if s not in suspect]
  counted = clean[-keep:]
  stay = {*steps[-1:], *counted}
  stay.update([s for s in clean if s in verified][-1:])
  # Of good ones `keep` follow what is older than this.
  border = counted[0] if len(counted) == keep else -1
  recent = [s for s in steps if s in suspect and s > border]
  if recent:
    stay.add(recent[0])
    stay.update([s for s in clean if s < recent[0]][-1:])
  return [s for s in steps if s not in stay]
