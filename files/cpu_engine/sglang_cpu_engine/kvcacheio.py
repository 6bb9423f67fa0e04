"""Stands in for ``sgl_kernel.kvcacheio``, which SGLang imports on every platform and calls only on GPUs."""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} copies between host and GPU; the CPU engine has no GPU")

    return unavailable
