"""``meshwise``: the commands, each imported only when it is used, and what becomes of what they raise.

Exit codes: 0 done, 1 something went wrong while running, 2 something asked for cannot be, 130 Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from cyclopts import App, CycloptsError, Parameter

from meshwise import __version__
from meshwise.errors import MeshwiseError

app = App(
    name="meshwise",
    help="Know how to split your training before you pay for it, and prove it by running it.",
    version=__version__,
    default_parameter=Parameter(negative=()),
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
app.command(
    "meshwise.cli.survey:survey",
    name="survey",
    sort_key=1,
    help="Train a model under many strategies and device counts, and compare them.",
)
app.command(
    "meshwise.cli.run:run", name="run", sort_key=2, help="Train a model under one strategy, measured as in a survey."
)
app.command(
    "meshwise.cli.verify:verify",
    name="verify",
    sort_key=3,
    help="Prove that a strategy trains the same model as one device does, to the last digits.",
)
app.command(
    "meshwise.cli.report:report", name="report", sort_key=4, help="Rebuild the report of one or more survey folders."
)
app.command(
    "meshwise.cli.strategies:strategies",
    name="strategies",
    sort_key=5,
    help="List the strategies, what each does and who found it.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process with its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Exit code of the command line ``arguments``; errors the user can mend are one line on stderr."""
    try:
        code = app(
            list(arguments), exit_on_error=False, print_error=False, help_on_error=False, result_action="return_value"
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except CycloptsError as error:
        return _complain(_parse_message(str(error), arguments), 2)
    except MeshwiseError as error:
        return _complain(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "torchvision", "transformers", "sklearn", "altair"):
            raise
        extra = "report" if error.name == "altair" else "torch"
        return _complain(f"{error.name} is not installed; pip install 'meshwise[{extra}]'", 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left
        return 0
    except Exception:
        sys.stderr.write(
            f"meshwise {__version__}: this is a bug; please file the lines below in the project's issue tracker\n"
        )
        raise


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"meshwise: {' '.join(message.split())}\n")
    return code


def _parse_message(message: str, arguments: Sequence[str]) -> str:
    """A parser's message as one line ending in what to type next."""
    line = " ".join(message.split()).rstrip(".")
    if "Did you mean" in line or "Choose from" in line:
        return line.partition(" Available commands")[0]
    command = next((word for word in arguments if word in ("survey", "run", "verify", "report", "strategies")), "")
    return f"{line}; see meshwise {command + ' ' if command else ''}--help"


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM, as batch systems send it, cleans up as Ctrl-C does."""
    raise KeyboardInterrupt
