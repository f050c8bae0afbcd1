"""Runs on a node before anything else does: says what address the node has, which ports are free and what it is.

Standard library only, sent to the node as text: the node need not have this package.
"""

import json
import os
import platform
import socket
import sys


def address(towards: str) -> str:
    """This machine's address on the way to another one; that one may be this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((towards, 9))
        return str(sock.getsockname()[0])


def taken(host: str, ports: list[int]) -> list[int]:
    """Ports of `host` that a server with SO_REUSEADDR, as all of ours are, could not listen on."""
    found = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
                sock.listen(1)
            except OSError:
                found.append(port)
    return found


def cpu_model() -> str:
    """Name of the processor."""
    try:
        with open("/proc/cpuinfo", errors="replace") as file:  # noqa: PTH123 - plain, for any Python
            names = [line.partition(":")[2].strip() for line in file if line.lower().startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def main() -> None:
    """Print one JSON object about this node; the argument is `{node: [port, ...]}`."""
    ports = json.loads(sys.argv[1])
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    host = address(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    answer = {
        "node": node,
        "address": host,
        "taken": taken(host, ports.get(node, [])),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
    }
    print("pdperf-node " + json.dumps(answer))


if __name__ == "__main__":
    main()
