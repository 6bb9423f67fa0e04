"""A plug-in of SGLang that runs its EAGLE workers on the CPU, in plain torch.

* :mod:`.plugin`: the entry points; the only module that changes SGLang's objects
* :mod:`.attention`: the attention backend, with the masks of speculative decoding
* :mod:`.tree`: building a draft tree and verifying it (SGLang: CUDA kernels of ``sgl_kernel``)
* :mod:`.bookkeeping`: KV slots and positions (SGLang: Triton kernels)
"""

SUPPORTED_SGLANG = ("0.5.12.post1",)
