"""The tokens that grammars allow.

compiling       compiles grammars before their requests get a seat
masks           which tokens grammars allow, found while the layers compute
held_matcher    the matcher of a seat, which follows its output
unmasked_rows   rows that are drawn without a mask and then checked
allowed_tokens  masks of allowed tokens

Decisions:

A matcher's state is a function of the grammar and of the output tokens. So only the grammar's text
travels, with the sampling parameters. The prefill node draws token 0 under it; the decode node, a
resumed victim, another node that continues an answer and a retry consume the tokens that were
output, at a few microseconds each. The runner keeps one matcher per seat, which is only a cache: it
is moved to the seat's tokens before each use, and made again where it cannot be. The KV protocol
does not know grammars.

Most rows are drawn before anyone knows what is allowed. A greedy draw, or one by temperature alone,
takes the largest of the values that every token has by itself. So where the token drawn from the
whole row is allowed, a mask would not have changed it, and the matcher answers this for one token
in microseconds. Where the grammar forces a token, that is the draw. A refused row is drawn again
with a mask. With noise the likeliest token must be allowed too: depths are counted from it, and
from another one they would differ in the last bits. Filters, log probabilities, penalties,
`min_tokens`, rules about tokens and rows with drafts take a mask from the start, and so does every
row on a card (`gpu/`). Both ways give the same tokens, so it does not matter which one a node
takes: `tests/equality/test_grammars.py` compares them, because rows with drafts take the second.

Those masks are filled on a thread while the layers compute. llguidance works without the
interpreter lock. The draw waits for the masks; checking draws, applying masks, and asking which
tokens are forced, is the step's own time. Finding the forced tokens of unmasked rows on the thread
too was measured and was no faster on two cores.

A forced token is a draft. Where the grammar allows one token, the draw is certain. The runner
returns these tokens with those that it drew, and they are verified like any other drafts, so they
cannot change an answer. They are text in the pieces of the model's tokenizer, because llguidance
forces no others.

No step compiles. Nodes try and compile a grammar when its request arrives, once for all requests
with the same grammar, and the scheduler sees a request only when its grammar is compiled. A step
that waited for a compilation would hold up every request in it, and a large schema takes a fifth of
a second. What is compiled is kept as long as the `Grammar` object of a request lives, and is
weighed: the trial measures what the heap grew by. Until then the request has its deadline and its
place in the bound of the queue, but no seat and no blocks, and a prompt's transfer is open already,
which renews the lease of its landing. A grammar that does not compile ends its requests with an
error. If a matcher fails later, its row allows no token: the request ends with an error, and no
token is drawn without the grammar. Nodes of the previous release would ignore a grammar, so a
node's record says that it follows them, and others are not chosen.
"""
