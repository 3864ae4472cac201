"""The embedded Valkey as one more child of `firsttoken up`: kept, restarted and drained like the services."""

from collections.abc import Mapping

from cli.plan import ChildSpec, DrainStage
from cli.run_folder import RunFolder
from shared.state.embedded import HOST, free_port, server_command

CHILD_ID = "valkey"  # the server itself writes valkey.log, where this child's log is too


def plan_redis(folder: RunFolder, around: Mapping[str, str]) -> tuple[ChildSpec, str]:
    """The child and its URL. A restart keeps the port: the services know no other. Raises EmbeddedValkeyError."""
    port = free_port()
    spec = ChildSpec(
        child_id=CHILD_ID,
        # Its own title would be written over its environment, by which tools tell whose process it is.
        command=(*server_command(port, folder.path), "--set-proc-title", "no"),
        environ=around,
        stage=DrainStage.STATE,
    )
    return spec, f"redis://{HOST}:{port}/0"
