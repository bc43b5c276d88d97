"""Python imports this by itself where its folder is on PYTHONPATH: no way out but to this machine, and a record.

Every look-up of a name and every connection to another machine is refused and written to the file that
NETWORK_ATTEMPTS names: process, what was asked, and the command.
"""

import ipaddress
import os
import sys

_EVENTS = {
    # To the place of the address, or of the name, among the arguments.
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
}


def _is_here(host: object, *, is_looked_up: bool) -> bool:
    text = host.decode() if isinstance(host, bytes) else str(host)
    if host is None or text in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    # To look up a number asks nobody.
    return is_looked_up or address.is_loopback or address.is_unspecified


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event not in _EVENTS:
        return
    asked = arguments[_EVENTS[event]]
    is_looked_up = event.startswith("socket.get")
    if not is_looked_up:
        if not isinstance(asked, tuple):  # a socket of this machine, by its path
            return
        asked = asked[0]
    if _is_here(asked, is_looked_up=is_looked_up):
        return
    with open(os.environ["NETWORK_ATTEMPTS"], "a", encoding="utf-8") as file:
        command = " ".join(" ".join(sys.orig_argv).split())[:300]
        file.write(f"{os.getpid()} {event} {asked!r} {command}\n")
    raise OSError(101, "Network is unreachable: refused by a test")


sys.addaudithook(_refuse)
