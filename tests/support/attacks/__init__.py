"""What outsiders try: attacks on ports, on files and processes, and what clients beside them get.

attacks           attacks on a port: invalid input, then a disconnect
attacks_on_files  tries with files and processes of another user
beside            what clients of a cluster are promised meanwhile
other_user        what another user of the machine tries, as a process of that user
"""
