"""ATOM's server with "kvserver" registered: python -m kvclient.atom_serve --model … --kv-transfer-config '{…}'

Takes the arguments of atom.entrypoints.openai_server. ATOM spawns its processes, and spawn imports the first process's
main module again in each. So the top level of this file runs in the parent, its children and grandchildren.
"""

import runpy
import sys

from kvclient.atom_hook import arm

SERVER = "atom.entrypoints.openai_server"

arm()

if __name__ == "__main__":
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=False)  # keeps this module as __main__ for spawn to import
