"""Where it is: slots in the DRAM arena and the ledger's records."""
