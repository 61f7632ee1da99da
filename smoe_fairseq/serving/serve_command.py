"""``smoe serve``: a page in the browser, and JSON for programs, before a trained model."""

import sys
from argparse import ArgumentParser, Namespace

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.numbers import port, positive, seconds
from smoe_fairseq.system.quiet import quietly

PORT = 8000


def add_arguments(parser: ArgumentParser) -> None:
    """The run, where to listen, and limits."""
    parser.add_argument("path", metavar="RUN", help="a run's folder, or a checkpoint")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder of dict.*.txt and spm.model, if they are not the run's",
    )
    parser.add_argument(
        "--from", dest="source", metavar="LANG", help="of one direction that the data do not say"
    )
    parser.add_argument("--to", dest="target", metavar="LANG", help="see there")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; others than this machine's own let other machines in "
        "(default: 127.0.0.1)",
    )
    for flag, kind, default, metavar, words in (
        ("--port", port, PORT, "N", "0: any that is free"),
        ("--max-tokens", positive, 200, "N", "subwords of a text"),
        ("--max-batch", positive, 32, "N", "texts that are translated together"),
        ("--max-queue", positive, 512, "N", "texts that may wait; more are refused for the moment"),
        ("--timeout", seconds, 60.0, "SECONDS", "from a request to its answer"),
    ):
        words = f"{words} (default: {default:g})"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=words)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, cuda:1, ...")


def run(args: Namespace) -> None:
    """Listens until a signal ends it; the exit status is then 128 and the signal's number, as a shell's."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UsageError(
            "smoe serve needs starlette and uvicorn: pip install 'smoe-fairseq[serve]'"
        ) from None
    from smoe_fairseq.serving.listener import is_loopback, listening

    with listening(args.host, args.port) as listener:  # before the model, which takes longer
        with quietly():
            from smoe_fairseq.serving.engine import Engine
            from smoe_fairseq.serving.server import serve
            from smoe_fairseq.translation.device import device_of

            engine = Engine.of_run(
                *(args.path, args.data, args.source, args.target, args.max_tokens),
                device=device_of(args.device),
            )
        if not is_loopback(args.host):
            print(
                f"warning: --host {args.host} lets other machines in: whoever reaches this one can "
                "have text translated, and nothing is encrypted",
                file=sys.stderr,
            )
        address = f"[{args.host}]" if ":" in args.host else args.host
        port_number = listener.getsockname()[1]
        print(f"{engine.name}: open http://{address}:{port_number}/ (Ctrl-C ends it)", flush=True)
        serve(engine, args, listener)
