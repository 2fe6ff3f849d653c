"""nginx for `bench gateway`: as the function behind every proxy, and as the proxy to beat.

One process each, without a master, so that its processor time is one number. The proxy does what a
careful operator writes: kept connections upstream, forwarding headers, a request id, no access log.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from keystage.bench.frame import BenchError
from keystage.local.api import Deployment

PROGRAM = "nginx"
START_S = 10.0
_MAIN = """daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  keepalive_requests 100000000;
  keepalive_timeout 120s;
  client_body_buffer_size 64k;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
{servers}
}}
"""
_FUNCTION = """  server {{
    listen 127.0.0.1:FUNCTION_PORT backlog=4096;
    set $part "{part}";
    location / {{ return 200 "$part$part$part$part"; }}
  }}"""
_PROXY = """  upstream function {{
    server {address};
    keepalive 128;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location {path} {{
      proxy_pass http://function/;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
      proxy_set_header X-Forwarded-Proto $scheme;
      proxy_set_header X-Call-Id $request_id;
    }}
  }}"""


def program() -> str:
    """Path of nginx, which Debian keeps where only root looks.

    Raises:
        BenchError: there is none.
    """
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise BenchError(f"{PROGRAM} is not installed (Debian: apt-get install nginx-light)")
    return found


def version() -> str:
    """Of the nginx here.

    Raises:
        BenchError: there is none.
    """
    said = subprocess.run([program(), "-v"], capture_output=True, text=True, check=True).stderr
    return said.rpartition("/")[2].strip()


def function(name: str, answer_bytes: int, folder: Path) -> Deployment:
    """A function that answers everything with the same bytes.

    Args:
        name: of the function.
        answer_bytes: size of the answer, a multiple of four.
        folder: for its files.
    """
    folder.mkdir()
    part = "y" * (answer_bytes // 4)
    text = _MAIN.format(folder=folder, servers=_FUNCTION.format(part=part))
    template = folder / "template.conf"
    template.write_text(text)
    conf = folder / "nginx.conf"
    fill = f'sed "s/FUNCTION_PORT/$PORT/" {shlex.quote(str(template))} > {shlex.quote(str(conf))}'
    serve = f"exec {program()} -p {shlex.quote(str(folder))} -c {shlex.quote(str(conf))}"
    return Deployment(service=name, image="none", envProcess=f"sh -c {shlex.quote(f'{fill} && {serve}')}")


@contextlib.contextmanager
def reverse_proxy(path: str, address: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Runs nginx in front of a function.

    Args:
        path: that it passes on.
        address: `host:port` of the function.
        folder: for its files.

    Yields:
        URL of the path, and process id.

    Raises:
        BenchError: it does not answer.
    """
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    conf = folder / "nginx.conf"
    servers = _PROXY.format(address=address, port=port, path=path)
    conf.write_text(_MAIN.format(folder=folder, servers=servers))
    with subprocess.Popen([program(), "-p", str(folder), "-c", str(conf)]) as process:
        try:
            _wait(port, process)
            yield f"http://127.0.0.1:{port}{path}", process.pid
        finally:
            process.terminate()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end_s:
                raise BenchError(f"nginx does not listen on port {port}: {error}") from error
            time.sleep(0.05)
        else:
            return
