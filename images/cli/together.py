"""Build images concurrently, each as soon as all that it needs exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from images.make.plan import Image


def together(
    images: Mapping[str, Image],
    hands: int,
    make: Callable[[Image], float],
    done: Callable[[Image, float], None],
    cancel: Callable[[], None],
) -> None:
    """Run `make`, which returns its seconds, on `hands` images at once. If one fails, `cancel` ends the others."""
    waiting, running = dict(images), dict[Future[float], Image]()
    with ThreadPoolExecutor(hands) as pool:
        try:
            while waiting or running:
                missing = {*waiting, *(image.key for image in running.values())}
                free = [image for image in waiting.values() if missing.isdisjoint(image.needs)]
                for image in free[: hands - len(running)]:
                    running[pool.submit(make, waiting.pop(image.key))] = image
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    done(running.pop(future), future.result())
        except BaseException:
            # The pool waits for its threads on the way out: their steps are ended, not sat through.
            pool.shutdown(wait=False, cancel_futures=True)
            cancel()
            raise
