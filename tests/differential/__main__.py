"""`python -m differential FIRST LAST [shrink]`: tests the programs of these seeds, and prints those that fail."""

from __future__ import annotations

import sys
import time
from collections import Counter

from differential.grammar import derive
from differential.script import script
from differential.tester import Failure, Rejected, tester


def main(first: int, last: int, shrinks: bool) -> None:
    """Tests seeds first to last - 1."""
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    with tester() as t:
        for seed in range(first, last):
            found = t.test(derive(seed))
            counts["right" if found is None else type(found).__name__.lower()] += 1
            if isinstance(found, Rejected):
                print(f"{seed}: rejected: {found.why}", flush=True)
            elif isinstance(found, Failure):
                found = t.shrunk(found) if shrinks else found
                print(f"{seed}: {found.first} and {found.second}: {found.where}", *found.texts[:6], sep="\n    ")
                print(
                    script(found.program) if shrinks else found.program.text(), dict(found.program.options), flush=True
                )
    print(f"seeds {first} to {last - 1}: {dict(counts)} in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "shrink" in sys.argv[3:])
