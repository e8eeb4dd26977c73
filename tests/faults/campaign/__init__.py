"""Random faults on real servers, from a seed, and a checker of what must hold all the same.

`python -m tests.faults.campaign --seeds 50` runs fifty plans; each failure prints the plan's seed,
what was broken, the evidence, the smallest set of faults that still breaks it, and how to run it
alone. `worker` is what is tested, `plan` what is done to it, `effects` and `history` what came of
it, `checker` what must be true of that.
"""
