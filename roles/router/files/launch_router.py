"""SGLang's router, with the key of its control plane from systemd's credentials.

The router itself takes that key on its command line only, which everybody on the host can read.
"""

import os
import sys
from pathlib import Path

from sglang_router.launch_router import launch_router, parse_router_args

arguments = parse_router_args(sys.argv[1:])
# Set where the unit has LoadCredential=, so without a key only where none is wanted.
if credentials := os.environ.get("CREDENTIALS_DIRECTORY"):
    key = Path(credentials, "control-key").read_text(encoding="ascii")
    # As `--control-plane-api-keys` is parsed: id, name, key, role.
    arguments.control_plane_api_keys = [("deploy", "deploy", key, "admin")]
launch_router(arguments)
