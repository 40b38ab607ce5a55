"""ATOM's server with "kvserver" registered: python -m kvclient.atom_serve --model … --kv-transfer-config '{…}'

Arguments are those of atom.entrypoints.openai_server. ATOM spawns its processes, and spawn imports the main module of
the first one again in each of them: so what stands here at the top level happens in parent, children and grandchildren.
"""

import runpy
import sys

from kvclient.atom_hook import arm

SERVER = "atom.entrypoints.openai_server"

arm()

if __name__ == "__main__":
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=False)  # this stays the module that is imported again
