"""The console script's door: imports nothing heavy before Ctrl-C is quiet."""

import signal


def main() -> None:
    """Ctrl-C while the rest is being imported ends the process by the signal, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.main import main as run  # half a second of imports

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
