"""The decoder on CPUs, in float32 or with int8 activations, by `kernels` on the cache's own memory.

A row's result depends on its own tokens alone, to the last bit.

back_end        what this package is to the runner
decoder         a decoder's three parts by kernels
layer_weights   a layer's weights as the kernels read them
packed_weights  weights in a mapped file that the nodes of a machine share
weight_memory   weights in private memory
mtp             a drafting layer by kernels
step_buffers    the arrays of a step, allocated once for the largest one
compile_once    kernels are compiled by one process of a machine
common_kernels  compiles the kernels that every model needs, divided among the nodes of a machine
integer_products  which products are computed in integers
library_pages   LLVM's pages are returned afterwards
"""
