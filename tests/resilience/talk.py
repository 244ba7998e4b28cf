"""One of two processes that talk over the channel: `python -m tests.resilience.talk distributed.KEY=VALUE …`.

Process 0 asks for a word, process 1 gives it from another thread, and waits for the answer; each prints what it read.
"""

import sys
import threading
import time
from collections.abc import Callable

from jaxtrain import distributed
from jaxtrain.config import DistributedConfig
from jaxtrain.resilience.channel import Channel


def wait_for(read: Callable[[], str | None]) -> str:
    """What `read` returns as soon as there is something."""
    while (text := read()) is None:
        time.sleep(0.01)
    return text


def main(arguments: list[str]) -> None:
    """Talks."""
    given = dict(argument.removeprefix("distributed.").split("=") for argument in arguments)
    process = int(given["process_id"])
    distributed.initialize(
        DistributedConfig(
            coordinator=given["coordinator"], processes=int(given["processes"]), process_id=process, start_timeout=120
        )
    )
    channel = Channel()
    if process == 0:
        assert channel.get("word/1") is None
        assert channel.get_all("word") == {}
        channel.put("question", "which word?")
        sys.stdout.write(f"heard {wait_for(lambda: channel.get('word/1'))}\n")
        channel.put("word/0", "thanks")
        channel.put("word/0", "thank you")
        channel.put("wording", "another folder")
        channel.put("answered", "yes")
    else:
        wait_for(lambda: channel.get("question"))
        thread = threading.Thread(target=channel.put, args=("word/1", "grün"))
        thread.start()
        thread.join()
        wait_for(lambda: channel.get("answered"))
        sys.stdout.write(f"read {sorted(channel.get_all('word').items())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
