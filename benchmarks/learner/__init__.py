"""`make bench BENCH=learner`: one step's passes, ours in packs and in rows, and TRL's."""
