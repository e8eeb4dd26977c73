"""An app whose module uses the store while it is imported: under --preload, before the fork."""

from __future__ import annotations

import os

from retrysafe import keys
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import Call, Held, Receipts
from retrysafe.settings import Settings
from retrysafe.stores import open_store
from tests.apps.shop import app

__all__ = ["app"]

_settings = Settings.from_env()
_receipts = Receipts(open_store(_settings.redis_url), IdempotencyPolicy().resolve(_settings))
_held = _receipts.begin(Call(f"import-{os.getpid()}", "", keys.NO_FINGERPRINT))
assert isinstance(_held, Held)
_held.finish(b"", 60)
