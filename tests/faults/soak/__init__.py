"""The soak: workers that live on through faults for half an hour, and must not grow.

`python -m tests.faults.soak --minutes 30`
"""
