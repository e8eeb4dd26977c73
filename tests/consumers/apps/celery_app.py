"""`celery -A tests.consumers.apps.celery_app worker`."""

from __future__ import annotations

from celery import Celery

from tests.consumers.apps.charges import BROKER, answered, asked, charge

app = Celery("orders", broker=BROKER)
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={"visibility_timeout": 2},
    broker_connection_retry_on_startup=True,
)


@app.task(name="handle")
def handle(message_id: str, order: str) -> None:
    asked(message_id)
    answered(charge(message_id, order))
