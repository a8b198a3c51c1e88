"""An S3 server on this machine, in a thread: moto's, which lasts as long as the test that asked for it."""

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock

BUCKET = "runs-of-tests"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Gives the address of an empty bucket; whatever reads the environment finds the server there."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key-of-the-tests",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with mock.patch.dict("os.environ", environment):
        s3fs.S3FileSystem.clear_instance_cache()  # of another server
        try:
            s3fs.S3FileSystem().mkdir(f"{BUCKET}-{port}")  # what earlier servers of this process held is still there
            yield f"s3://{BUCKET}-{port}"
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()
