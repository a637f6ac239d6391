"""Files that more than one process reads or writes.

keys_folder     the keys of one process, read and checked
secret_files    which files may hold a secret
cache_folder    something is built in the cache folder once, whole or not at all
trusted_folder  whether only this user and root can put files into a folder
code_cache      where compiled kernels are kept
file_stamp      what tells that a file has changed
tokenizer_files a tokenizer's end token, and its tokens within a vocabulary
tls_handshake   TLS within this process, to check a certificate
"""
