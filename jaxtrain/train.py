"""python -m jaxtrain.train CONFIG [key=value …]: trains, or goes on training, to the config's goal."""

import sys
import traceback
from collections.abc import Sequence

from jaxtrain.config import Config, dump, parse_arguments
from jaxtrain.errors import EXIT_COMPLETE, EXIT_CRASHED, EXIT_INTERRUPTED, JaxtrainError


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    try:
        parsed = parse_arguments("python -m jaxtrain.train", arguments)
        if parsed.print_config:
            print(dump(parsed.config), end="")
        else:
            train(parsed.config)
        return EXIT_COMPLETE
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        return _leave(EXIT_INTERRUPTED)
    except JaxtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return _leave(error.exit_code)
    except Exception:
        traceback.print_exc()
        return _leave(EXIT_CRASHED)


def train(config: Config) -> None:
    """Trains in this process, joining the others where there are any."""
    from jaxtrain import runtime

    runtime.configure(config)
    import jax

    from jaxtrain import distributed, loop

    distributed.initialize(config.distributed)
    loop.run(config, jax.devices())


def _leave(code: int) -> int:
    """For what may have hit this process alone: the others may wait in a collective, and must not be waited for."""
    distributed = sys.modules.get("jaxtrain.distributed")
    if distributed is not None:
        distributed.leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
