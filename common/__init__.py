"""Values shared by every role. Standard library only.

Requests and nodes
    ids             incarnations, attempts, request ids
    request         what a client asks for, and what a node answers
    grammar         a grammar that an answer must follow, as text
    token_rules     biases, bad words and allowed tokens of a request
    prompt_logprobs log probabilities of the tokens of a prompt
    nodes           what the cluster knows of a node: its record and its load
    wire_types      types of received values, with the limits that decoders check
    errors          the typed errors, each with a stable code

KV
    kv_layout       the shape of a KV cache, and its fingerprint
    blocks          block arithmetic and block hashes
    token_budget    how many tokens a step, a sequence and a pool can hold
    memory_plan     how a node's memory is divided into the largest step and the KV cache

Configuration
    setting             how a setting declares its choices, bounds and unit
    config              all sections, and the rules between them
    api_config          the section of the router's API
    scheduling_config   the sections of scheduling and speculation
    tracing_config      the section of tracing
    model_names         the models that are known by name, and names of a served one
    redis_url           the address of the placement store: its forms and parts
    keys_folder         the keys of one process, read and checked
    secret_files        which files may hold a secret
    cache_folder        something is built in the cache folder once, whole or not at all
    tokenizer_files a tokenizer's end token, and its tokens within a vocabulary
    trusted_folder      whether only this user and root can put files into a folder
    code_cache          where compiled kernels are kept
    file_stamp          what tells that a file has changed
    tls_handshake       TLS within this process, to check a certificate

Time and observation
    clock           monotonic and manual clocks
    histogram       counts of values by size
    latency         TTFT, TPOT, goodput: what they mean
    logs            log lines as text or JSON
    tracing         the interface of traces, and the one that records nothing
    version         the version of this package
    addresses       host:port, and what is loopback
    child_process   how a process starts another, which never outlives it
"""
