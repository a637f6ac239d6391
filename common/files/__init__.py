"""Files that more than one process reads or writes.

keys_folder        the keys of one process, read and checked
secret_files       which files may hold a secret
replaced_file      replaces a file whole, with its owner and mode
followed_files     files that are read again when they change
file_stamp         detects that a file has changed
certificate_dates  warns of certificates that are about to end
tls_handshake      TLS within this process, to check a certificate
cache_folder       something is built in the cache folder once, whole or not at all
trusted_folder     whether only this user and root can put files into a folder
code_cache         where compiled kernels are kept
tokenizer_files    a tokenizer's end token, and the tokens that its files declare and its model has
model_config       the longest context of a model
kept_files         small files of a model, read once for this process and its helpers

Decisions:

Compiled kernels are code. numba unpickles what it finds in its cache. So the folder is judged
before, with all that is in it: another user who owns or may write any of it, or may exchange it,
would run code as this user.
"""
