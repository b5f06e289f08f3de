"""What `muster bench` measures: a program a claim, each a ratio against the best existing way in the same run."""
