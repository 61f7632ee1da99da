"""The address that the server has."""

import errno
import ipaddress
import socket

from smoe_fairseq.system.errors import UsageError

BACKLOG = 1024  # connections that wait to be accepted


def listening(host: str, port: int) -> socket.socket:
    """A socket that has its address already, so that nobody takes it while the model is loaded.

    Raises:
        UsageError: the port is in use, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no name of a machine"
        raise UsageError(f"--host {host}: {why}; expected an address such as 127.0.0.1") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            sentence = f"--port {port} is in use: name another, or 0 for any that is free"
        elif error.errno == errno.EADDRNOTAVAIL:
            sentence = f"--host {host}: no address of this machine; expected one, or 127.0.0.1"
        else:
            sentence = f"--host {host} --port {port}: {error.strerror}"
        raise UsageError(sentence) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_names(host: str) -> frozenset[str] | None:
    """What a server on the loopback address is called; None for others, which may have many names."""
    if not is_loopback(host):
        return None
    return frozenset({"127.0.0.1", "::1", "localhost", host.lower()})
