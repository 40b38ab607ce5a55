"""In place of kvserver.disk_quiet: devices are at work for as long as there is the file that DISKS_AT_WORK names."""

import os
import time

while os.path.exists(os.environ["DISKS_AT_WORK"]):
    time.sleep(0.01)
