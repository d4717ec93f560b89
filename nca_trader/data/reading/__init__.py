"""Reading bars from files: parse, detect faults, refuse or repair, assemble."""
